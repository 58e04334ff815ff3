"""What is added to a site's scores: linear biases and buckets by our formulas, anything else as the model has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headscope.attention.alibi import alibi_key_bias, alibi_slopes, round_to_bfloat16
from headscope.attention.relative import relative_bias
from headscope.models.pruned import head_numbers, pruned_state
from headscope.proof.record import SiteRecord, to_float


@dataclass(frozen=True)
class BiasPlan:
    """A bias and where it comes from.

    Attributes:
        kind: `buckets` (T5), `alibi`, `argument` (the attention function's `position_bias`) or `method` (what the
            module's own bias method returned).
        own: By our formulas.
        table: (buckets, heads), our copy, for `buckets`.
        bidirectional, max_distance: As in `relative_bias`.
        factor: What an `alibi` bias is multiplied with.
        rounded: An `alibi` bias is computed in bfloat16, whatever the model's dtype.
        given: The tensor of an `argument`, our copy.
        terms: Terms of the scores besides the content's, by which the scale is divided (DeBERTa).
    """

    kind: str
    own: bool
    table: Tensor | None = None
    given: Tensor | None = None
    bidirectional: bool = False
    max_distance: int = 128
    factor: float = 1.0
    rounded: bool = False
    terms: int = 0


def given_bias(record: SiteRecord, table: nn.Module | None) -> BiasPlan | None:
    """The bias that the attention function was given, by our formula where that gives it; None where there was none.

    Args:
        table: The stack's table of bucket biases (T5 keeps one for all layers), None where there is none.
    """
    arguments = record.call.arguments
    given = None if arguments is None else arguments.options.get("position_bias")
    if not isinstance(given, Tensor) or not bool(given.any()):
        return None
    if isinstance(table, nn.Embedding):
        plan = _buckets(record, table)
        ours = bias_tensor(plan, record)
        same = ours.shape[-2:] == given.shape[-2:] and torch.allclose(ours, to_float(given), atol=1e-4)
        if same:
            return plan
    return BiasPlan("argument", own=False, given=to_float(given).clone())


def shown_biases(record: SiteRecord, dim: int) -> Iterator[BiasPlan | None]:
    """What a module that shows only its weights may add to its scores."""
    if record.bias is not None:
        kinds = getattr(record.site.module, "pos_att_type", None) or ()
        yield BiasPlan("method", own=False, terms=len(kinds))
        return
    yield None
    if any(record.arguments.get(n) is not None for n in ("alibi", "position_bias")) or _alibi_argument(record):
        yield BiasPlan("alibi", own=True)
        for times in (1, 2):
            yield BiasPlan("alibi", own=True, factor=times * dim**-0.5, rounded=True)


def bias_tensor(plan: BiasPlan, record: SiteRecord) -> Tensor:
    """The bias, float32, broadcastable to (batch, head, query, key)."""
    _, heads, rows, keys = record.call.weights.shape
    if plan.kind == "buckets":
        return _bucket_bias(plan, rows, keys)
    if plan.kind == "alibi":
        return _linear_bias(plan, _slopes(record.site.module, heads), keys)
    if plan.kind == "method":
        assert record.bias is not None
        bias = to_float(record.bias)
        return bias.reshape(-1, heads, *bias.shape[-2:])
    assert plan.given is not None
    return plan.given


def _bucket_bias(plan: BiasPlan, rows: int, keys: int) -> Tensor:
    assert plan.table is not None
    bias = relative_bias(
        plan.table.numpy(), rows, keys, bidirectional=plan.bidirectional, max_distance=plan.max_distance
    )
    return torch.from_numpy(bias).float()[None]


def _slopes(module: nn.Module, heads: int) -> NDArray[np.float64]:
    """The slope of each head; what is left of a pruned module keeps slopes that depend on how many heads there were."""
    state = pruned_state(module)
    return alibi_slopes(heads) if state is None else alibi_slopes(state.num_heads)[list(state.kept)]


def _linear_bias(plan: BiasPlan, slopes: NDArray[np.float64], keys: int) -> Tensor:
    positions = np.arange(keys)
    linear = alibi_key_bias(slopes, positions)
    if plan.rounded:
        linear = round_to_bfloat16(alibi_key_bias(round_to_bfloat16(slopes), round_to_bfloat16(positions)))
    return torch.from_numpy(linear * plan.factor).float()[None]


def _buckets(record: SiteRecord, table: nn.Embedding) -> BiasPlan:
    distance = getattr(record.config, "relative_attention_max_distance", 128)
    # The table of all layers has a column for each head of the original model.
    kept = head_numbers(record.site.module, record.call.weights.shape[1])
    return BiasPlan(
        "buckets",
        own=True,
        table=to_float(table.weight)[:, list(kept)].clone(),
        bidirectional=not record.site.causal,
        max_distance=distance,
    )


def _alibi_argument(record: SiteRecord) -> bool:
    """A tensor argument that is the same in all rows and falls or rises along the keys: BLOOM's `alibi`."""
    keys = record.call.weights.shape[-1]
    return any(t.shape[-1] == keys and t.shape[-2] == 1 for t in record.tensors.values())
