"""How the heads that went were chosen, and what a repair came to, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1, inf

from headscope.pruning.outcome import Chosen, RefitLayer, RepairOutcome, Sizes
from headscope.pruning.result import PruneResult
from headscope.views.sections import plural

# exp of more is no float.
_LARGEST = 709.0
_LOSSES = {
    "causal": "nats a token",
    "decoder": "nats a token",
    "masked": "nats a masked token",
    "classifier": "nats a text",
    "output": "1 - cosine to the original's output",
}
_UNITS = {"head": "head", "kv-group": "KV group"}


def chosen_lines(result: PruneResult) -> list[str]:
    """How many went by which scores, what that costs on texts that chose nothing, and who had which texts."""
    return [] if result.chosen is None else _chosen(result.chosen)


def repair_lines(result: PruneResult) -> list[str]:
    """Whether a repair was applied and why, and what was refitted."""
    return [] if result.repair is None else _repair(result.repair)


def loss_unit(kind: str | None) -> str:
    """What a kind of loss is counted in."""
    return _LOSSES.get(kind or "", "loss")


def counts_tokens(kind: str | None) -> bool:
    """Whether a kind of loss is one that perplexity is made of."""
    return kind in ("causal", "decoder")


def perplexity_rise(added: float) -> float:
    """By what share perplexity rises with so many nats of added loss: exp(added) - 1."""
    return expm1(added) if added < _LARGEST else inf


def sizes_line(sizes: Sizes) -> str:
    """Texts and tokens by what they were for."""
    return "; ".join(f"{role} {plural(texts, 'text')}, {tokens:,} tokens" for role, (texts, tokens) in sizes.items())


def _chosen(found: Chosen) -> list[str]:
    unit = _UNITS.get(found.unit, found.unit)
    lines = [f"{found.count:,} of {plural(found.of, unit)} ({100 * found.share:.1f} %) by {found.method}"]
    loss = _loss(found)
    if loss:
        lines.append(f"added loss: {loss}")
    if found.sizes:
        lines.append(f"data, nothing used twice: {sizes_line(found.sizes)}")
    return lines


def _loss(found: Chosen) -> str:
    """Predicted and measured side by side."""
    predicted = "" if found.predicted is None else f"{found.predicted:.4f} predicted"
    if found.measured is None:
        return predicted
    measured = f"{found.measured:.4f} measured on the report texts"
    if found.low is not None and found.high is not None:
        measured += f" (95 % interval {found.low:.4f} to {found.high:.4f})"
    rise = f"; perplexity {100 * perplexity_rise(found.measured):+.2f} %" if counts_tokens(found.loss) else ""
    return f"{f'{predicted}, ' if predicted else ''}{measured}, {loss_unit(found.loss)}{rise}"


def _repair(found: RepairOutcome) -> list[str]:
    what = "output and down projections" if found.mlp else "output projections"
    changed = [layer for layer in found.layers if layer.ridge is not None]
    lines = [f"repair {'applied' if found.applied else 'NOT applied'}: {found.reason}"]
    fitted = f"{len(changed)} of {len(found.layers)} {what} refitted on {plural(found.texts, 'text')}, "
    lines.append(f"{fitted}{found.tokens:,} tokens{_errors(changed)}")
    return lines


def _errors(layers: Sequence[RefitLayer]) -> str:
    """What was left of the targets' size, on average, and the ridges."""
    if not layers:
        return ""
    before, after = (
        sum(errors) / len(layers) for errors in zip(*((x.error_before, x.error_after) for x in layers), strict=True)
    )
    ridges = sorted({layer.ridge for layer in layers if layer.ridge is not None})
    ridge = f"{ridges[0]:g}" if len(ridges) == 1 else f"{ridges[0]:g} to {ridges[-1]:g}"
    return f"; they miss their targets by {100 * before:.1f} % before, {100 * after:.1f} % after (mean); ridge {ridge}"
