"""What `prune` measured: frozen, without torch and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headscope.pruning.outcome import Chosen, RepairOutcome
from headscope.pruning.report import PRUNE_SCHEMA, Equivalence, finite
from headscope.pruning.save_report import Form, SaveReport
from headscope.results import ModelInfo

Pass = Literal["forward", "decode"]


@dataclass(frozen=True)
class Change:
    """A number before and after."""

    before: float
    after: float

    @property
    def share(self) -> float:
        """What is gone, as a share of what there was; 0 where there was nothing."""
        return 1 - self.after / self.before if self.before else 0.0

    def to_dict(self) -> dict[str, float]:
        """As JSON has it."""
        return {"before": self.before, "after": self.after}


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one layer.

    Attributes:
        num_heads, num_kv_heads: Of the original model.
        left, kv_left: In the weights afterwards, zeroed ones included.
        gone: Heads that give nothing any more, in original numbers, earlier prunings included.
        zeroed: Those of them that are still in the weights.
    """

    stack: str
    layer: int
    num_heads: int
    num_kv_heads: int
    left: int
    kv_left: int
    gone: tuple[int, ...]
    zeroed: tuple[int, ...]

    @property
    def name(self) -> str:
        """`self.5`."""
        return f"{self.stack}.{self.layer}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self.__dict__, "gone": list(self.gone), "zeroed": list(self.zeroed)}


@dataclass(frozen=True)
class Latency:
    """Time of one forward pass for one shape of input, in milliseconds.

    Attributes:
        batch, length: Examples, and tokens in each, of the input or, while decoding, in the cache; the length is None
            where the input is no text.
        before_ms, after_ms: Medians.
        before_middle, after_middle: First and third quartile: between them lies the middle half of the times.
        rounds: How often each model ran.
        in_noise: Whether there may be no difference: a 95 % interval for the median of the ratios, round by round,
            includes 1.
        kind: `forward`: over the whole input. `decode`: one more token for each example, with a cache of the others.
    """

    batch: int
    length: int | None
    before_ms: float
    after_ms: float
    before_middle: tuple[float, float]
    after_middle: tuple[float, float]
    rounds: int
    in_noise: bool
    kind: Pass = "forward"

    @property
    def ratio(self) -> float:
        """Time after divided by time before: below 1 is faster."""
        return self.after_ms / self.before_ms

    def to_dict(self) -> dict[str, Any]:
        """One record of the `latency` list of the JSON contract."""
        return {
            "kind": self.kind,
            "batch": self.batch,
            "length": self.length,
            "before_ms": self.before_ms,
            "after_ms": self.after_ms,
            "ratio": self.ratio,
            "before_quartiles_ms": list(self.before_middle),
            "after_quartiles_ms": list(self.after_middle),
            "rounds": self.rounds,
            "in_noise": self.in_noise,
        }


@dataclass(frozen=True)
class Conditions:
    """What latency was measured on: attention is the implementation, threads are torch's."""

    device: str
    dtype: str
    attention: str
    threads: int


@dataclass(frozen=True)
class Quality:
    """How good a model is on some texts, before and after.

    Attributes:
        metric: `perplexity`, `pseudo_log_likelihood_loss`, `accuracy` or `cosine`.
        better: `lower` or `higher`.
        texts: Examples that count.
        tokens: Tokens that were predicted; those that were read where none are.
        detail: What exactly was measured, in a line.
    """

    metric: str
    better: str
    before: float
    after: float
    texts: int
    tokens: int
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """The `quality` object of the JSON contract; what is not finite is null."""
        return {name: finite(value) for name, value in self.__dict__.items()}


@dataclass(frozen=True)
class PruneResult:
    """What `prune` found; `to_dict` is the JSON contract's object.

    Attributes:
        model: The model before, with the numbers of heads of the original.
        form: What is saved or would be.
        layers: Those that lost heads, by this pruning or before.
        params: Numbers in all parameters; shared ones count once.
        attention_params: Those of the projections of attention among them, biases included.
        bytes: The tensors of a safetensors file, without its header.
        kv_cache: Bytes that a decoder's cache grows by with every token (an encoder-decoder's own tokens); 0 without.
        latency: Empty where it was not measured.
        quality: None where there was nothing to measure on.
        chosen: How the heads were chosen; None where they were named.
        repair: What refitting came to; None where it was not asked for.
        saved: What was written, loaded again and compared; None where nothing was.
    """

    model: ModelInfo
    form: Form
    layers: tuple[LayerHeads, ...]
    params: Change
    attention_params: Change
    bytes: Change
    kv_cache: Change
    equivalence: Equivalence
    latency: tuple[Latency, ...]
    conditions: Conditions | None
    quality: Quality | None
    chosen: Chosen | None
    repair: RepairOutcome | None
    saved: SaveReport | None
    warnings: tuple[str, ...]
    versions: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether the pruned model computes what the original does with the same heads zeroed."""
        return self.equivalence.passed

    @property
    def heads(self) -> dict[str, tuple[int, ...]]:
        """Heads that give nothing any more, by `stack.layer`, in original numbers."""
        return {layer.name: layer.gone for layer in self.layers}

    def to_dict(self) -> dict[str, Any]:
        """The object that `headscope prune -f json` prints."""
        return {
            "schema": PRUNE_SCHEMA,
            "versions": dict(self.versions),
            "model": self.model.to_dict(),
            "heads": {name: list(heads) for name, heads in self.heads.items()},
            "zeroed": {layer.name: list(layer.zeroed) for layer in self.layers if layer.zeroed},
            "layers": [layer.to_dict() for layer in self.layers],
            "save_as": self.form,
            "params": self.params.to_dict(),
            "attention_params": self.attention_params.to_dict(),
            "bytes": self.bytes.to_dict(),
            "kv_cache_bytes_per_token": self.kv_cache.to_dict(),
            "equivalence": self.equivalence.to_dict(),
            "chosen": None if self.chosen is None else self.chosen.to_dict(),
            "repair": None if self.repair is None else self.repair.to_dict(),
            "latency": [cell.to_dict() for cell in self.latency],
            "latency_conditions": None if self.conditions is None else asdict(self.conditions),
            "quality": None if self.quality is None else self.quality.to_dict(),
            "output": None if self.saved is None else self.saved.output,
            "reloaded": None if self.saved is None else self.saved.equivalence.to_dict(),
            "warnings": list(self.warnings),
        }
