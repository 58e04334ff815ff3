"""What a check that passes has still not shown: schemes that were taken over from the model, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from headscope.models.selection import ranges
from headscope.proof.masks import blocked
from headscope.proof.plan import Plan
from headscope.proof.record import SiteRecord
from headscope.proof.reference import Layer, Reference, axes_of, layer_of
from headscope.results import SiteCheck

# Weights that may be this far off say little of a head.
_VAGUE = 0.25


def doubts(pairs: Sequence[tuple[Plan, SiteRecord]], checks: Sequence[SiteCheck], reference: Reference) -> list[str]:
    """One line a stack and doubt, with its layers."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for plan, record in pairs:
        for doubt in (_of_mask(plan, record, reference), plan.doubt):
            if doubt is not None:
                found[record.site.stack, doubt].add(record.site.layer)
    for check in checks:
        if check.allowed_weights > _VAGUE:
            doubt = "scores are so large that this dtype has no digits for them, nearly anything passes: use float32"
            found[check.stack, doubt].add(check.layer)
    checked = {layer_of(record.site) for _, record in pairs}
    for stack, layer in _same_class(reference.unlike, checked):
        found[stack, "it computes otherwise than other layers of the same class, and is not checked"].add(layer)
    return [f"{stack}: {doubt} (layers {ranges(sorted(layers))})" for (stack, doubt), layers in found.items()]


def _same_class(unlike: Sequence[Layer], checked: set[Layer]) -> list[Layer]:
    """Odd layers of the stacks that were checked."""
    return [layer for layer in unlike if layer[0] in {stack for stack, _ in checked}]


def _of_mask(plan: Plan, record: SiteRecord, reference: Reference) -> str | None:
    """What a mask of the model does that our own would not."""
    if plan.mask.own:
        return None
    query, key = axes_of(record, reference.batch)
    opened = ~blocked(plan.mask, record, query, key) & query.valid.cpu()[:, None, :, None]
    if record.site.causal and bool(opened.triu(1).any()):
        return "the model's own mask lets tokens see later ones in a causal model"
    if record.site.query_axis not in ("text", "decoder"):
        return None
    return "the mask is the model's own, since ours, of padding and what the config says, is another"
