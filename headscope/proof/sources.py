"""What a module is given, as candidates for what its projections take in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from torch import Tensor

from headscope.proof.record import PROJECTION_INPUT, SiteRecord, to_float


def source_tensor(record: SiteRecord, names: tuple[str, ...]) -> Tensor:
    """The sum of the module's inputs of these names, float32 (batch, n, features)."""
    tensors = [to_float(record.tensors[n]) for n in names]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def possible_sources(record: SiteRecord, width: int) -> list[tuple[str, ...]]:
    """The inputs that fit a projection of `width` features, likeliest first.

    The module's own inputs one by one, sums of two (detection models add positions to them), then what entered the
    projections, for modules that change their input before they project it.
    """
    fit = [n for n, t in record.tensors.items() if t.shape[-1] == width]
    entering = [n for n in fit if n in PROJECTION_INPUT.values()]
    names = [n for n in fit if n not in entering]
    return [*((n,) for n in names), *_pairs(record, names), *((n,) for n in entering)]


def _pairs(record: SiteRecord, names: list[str]) -> Iterator[tuple[str, str]]:
    return ((a, b) for a, b in combinations(names, 2) if record.tensors[a].shape == record.tensors[b].shape)
