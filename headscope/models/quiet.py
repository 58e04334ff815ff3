"""Silence for what transformers logs, draws and warns while it loads; everything is put back afterwards."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import huggingface_hub.utils as hub_utils
from transformers.utils import logging as transformers_logging

LOGGERS = ("transformers", "huggingface_hub", "accelerate", "torch", "filelock", "httpx", "httpx2")


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block nothing that transformers says reaches standard output, standard error or the warnings.

    Some progress bars ignore transformers' own switch and write to standard error, so both streams lead nowhere too.
    """
    hub_bars: Any = hub_utils  # its type information leaves the switches for progress bars out
    transformers_bars: Any = transformers_logging
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    bars, hub_bars_off = transformers_bars.is_progress_bar_enabled(), hub_bars.are_progress_bars_disabled()
    try:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            transformers_bars.disable_progress_bar()
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            transformers_bars.enable_progress_bar()
        (hub_bars.disable_progress_bars if hub_bars_off else hub_bars.enable_progress_bars)()
