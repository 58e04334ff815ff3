"""What is measured on a corpus, and how: all that a worker in another process has to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headscope.heads.rules import RuleSet
from headscope.models.selection import Selection


@dataclass(frozen=True)
class Job:
    """The measurement, as data.

    Attributes:
        model: Hub id, directory or `.gguf` file.
        tokenizer: Another tokenizer than the model's, by name.
        loading: `revision`, `device`, `dtype`, `device_map`, `trust_remote_code`.
        layer, head, stack: Which heads are measured.
        rules, names: The rule set, and the metrics beside its own.
        engine, words, exclude_special, max_length, strict_length, batch_size: As for `analyze`.
        types: Types of heads that are measured on the texts.
        decoder_text: What an encoder-decoder's decoder reads beside every text; generated where it is None.
        per_text: Whether each text's values come back.
        strict: Whether a text of which the tokenizer makes nothing ends the run.
        seed: Of the few architectures that draw random numbers as they run.
        threads: Of torch, in a worker's process; None leaves them as they are.
    """

    model: str | None
    layer: Selection
    head: Selection
    stack: tuple[str, ...] | None
    rules: RuleSet
    names: tuple[str, ...]
    tokenizer: str | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "auto"
    types: tuple[str, ...] = ()
    words: bool = False
    exclude_special: bool = False
    decoder_text: str | None = None
    max_length: int | None = None
    strict_length: bool = False
    batch_size: int | None = None
    per_text: bool = False
    strict: bool = False
    seed: int = 0
    threads: int | None = None

    @property
    def shown(self) -> tuple[str, ...]:
        """The metrics that records show."""
        return tuple(dict.fromkeys((*self.names, *self.rules.metrics)))

    def on(self, device: str | None) -> Job:
        """The same job on another device; None leaves it as it is."""
        return self if device is None else replace(self, loading={**self.loading, "device": device})
