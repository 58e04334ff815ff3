"""Who may look at whom at a site: our own mask from what the site says of itself, else the model's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention.masks import causal_mask, chunked_mask, sliding_window_mask, two_sided_window_mask
from headscope.capture.feed import Axis
from headscope.capture.visible import open_cells
from headscope.models.sites import Site
from headscope.proof.record import SiteRecord

# Where modules and configs keep the size of a window or a chunk.
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")


@dataclass(frozen=True)
class MaskPlan:
    """How a site's mask is made.

    Attributes:
        own: From the lengths of the texts and from `kind` and `size`; False takes the model's.
        kind: `full`, `causal`, `window`, `two_sided` or `chunked`.
        size: Tokens of the window or chunk.
    """

    own: bool
    kind: str = "full"
    size: int = 0


def plan_masks(record: SiteRecord, query: Axis, key: Axis) -> list[MaskPlan]:
    """Our own mask where it hides exactly what the model's does, else the model's.

    A module that shows no mask gives several to try: what the site says of itself, and causal where none of its weights
    looks ahead.
    """
    declared = list(_declared(record.site, record))
    theirs = model_blocked(record, query, key)
    if theirs is None:
        ahead = record.call.weights.triu(1) if record.call.weights.shape[-1] > 1 else record.call.weights
        return declared + ([] if bool(ahead.any()) else [MaskPlan(True, "causal")])
    if graded(record):
        return [MaskPlan(False)]
    for plan in declared:
        if torch.equal(_counted(blocked(plan, record, query, key), query), _counted(theirs, query)):
            return [plan]
    return [MaskPlan(False)]


def blocked(plan: MaskPlan, record: SiteRecord, query: Axis, key: Axis) -> Tensor:
    """bool (batch, 1, query, key), True where a row may not look."""
    padding = ~key.valid[:, None, None, :].cpu()
    rows, keys = query.special.shape[1], key.special.shape[1]
    if not plan.own and graded(record) and _is_boolean(record):
        return torch.zeros(1, 1, rows, keys, dtype=torch.bool)
    if not plan.own:
        theirs = model_blocked(record, query, key)
        return padding.expand(-1, -1, rows, -1) if theirs is None else theirs
    if plan.kind == "full":
        return padding.expand(-1, -1, rows, -1)
    shape = {
        "causal": lambda: causal_mask(rows, keys),
        "window": lambda: sliding_window_mask(rows, keys, window=plan.size),
        "two_sided": lambda: two_sided_window_mask(rows, keys, distance=plan.size),
        "chunked": lambda: chunked_mask(rows, keys, chunk_size=plan.size),
    }[plan.kind]()
    return padding | torch.from_numpy(shape)[None, None]


def model_blocked(record: SiteRecord, query: Axis, key: Axis) -> Tensor | None:
    """What the model's mask hides, bool (batch, 1, query, key); None where the attention function was given none."""
    arguments = record.call.arguments
    if arguments is None:
        return None
    rows, keys = record.call.weights.shape[-2:]
    batch = len(query.lengths)
    if arguments.mask is None:
        return torch.zeros(batch, 1, rows, keys, dtype=torch.bool)
    return ~open_cells(arguments.mask, rows, keys).expand(batch, 1, rows, keys).cpu()


def graded(record: SiteRecord) -> bool:
    """Whether the model's mask is more than open or closed: scores of its own, added to those of queries and keys."""
    mask = None if record.call.arguments is None else record.call.arguments.mask
    if mask is None:
        return False
    if mask.dtype == torch.bool:
        # Some models add a boolean mask instead of masking with it: then what it hides has weight all the same.
        seen = open_cells(mask, *record.call.weights.shape[-2:])
        return bool(record.call.weights.masked_fill(seen, 0).any())
    return bool((mask[mask > torch.finfo(mask.dtype).min / 2] != 0).any())


def _is_boolean(record: SiteRecord) -> bool:
    arguments = record.call.arguments
    return arguments is not None and arguments.mask is not None and arguments.mask.dtype == torch.bool


def _counted(mask: Tensor, query: Axis) -> Tensor:
    """Rows of padding hide nothing that matters."""
    return mask & query.valid[:, None, :, None].cpu()


def _declared(site: Site, record: SiteRecord) -> Iterator[MaskPlan]:
    """What the site says of itself: causal or not, and the windows that it names."""
    sizes = _sizes(record)
    options = {} if record.call.arguments is None else record.call.arguments.options
    if site.causal and isinstance(options.get("sliding_window"), int):
        # The layer is windowed, so that a mask without a window is not what the config says.
        yield MaskPlan(True, "window", options["sliding_window"])
        yield MaskPlan(True, "chunked", options["sliding_window"])
        return
    if not site.causal and True not in (options.get("is_causal"), record.arguments.get("is_causal")):
        yield MaskPlan(True)
        for size in sizes:
            yield MaskPlan(True, "two_sided", size // 2)
            yield MaskPlan(True, "two_sided", size)
            yield MaskPlan(True, "two_sided", size - 1)
        return
    yield MaskPlan(True, "causal")
    for size in sizes:
        yield MaskPlan(True, "window", size)
        yield MaskPlan(True, "chunked", size)


def _sizes(record: SiteRecord) -> list[int]:
    options = {} if record.call.arguments is None else record.call.arguments.options
    found = [options.get("sliding_window"), record.arguments.get("sliding_window")]
    for owner in (record.site.module, record.config):
        # As stored: configs with one value a layer refuse to be asked for one.
        found += [vars(owner).get(n) for n in _WINDOWS] if owner is not None else []
    sizes = [v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    return list(dict.fromkeys(sizes))
