"""Rotary positions of a site: our own angles from its config, else those that the model handed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from headscope.attention.frequencies import Frequencies, default_frequencies, rotary_frequencies
from headscope.attention.rotary import rotary_cos_sin
from headscope.proof.record import SiteRecord, to_float

# Angles of the model this far from ours are others. Models in half precision round cosines to it.
_SAME_ANGLES = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Turn:
    """How queries and keys are turned by their positions.

    Attributes:
        cos, sin: (n, pairs) or (batch, n, pairs), float32.
        own: Computed from the config by our formulas; False where they are the model's own tensors.
        interleaved: Pairs are neighbours instead of the two halves.
    """

    cos: Tensor
    sin: Tensor
    own: bool
    interleaved: bool

    def fits(self, batch: int, length: int, dim: int) -> bool:
        """Whether it can turn (batch, heads, length, dim)."""
        shape = self.cos.shape
        same = self.sin.shape == shape and shape[-2] >= length if self.own else shape[-2] == length
        return same and 2 * shape[-1] <= dim and (len(shape) == 2 or shape[0] in (1, batch))


def turns(record: SiteRecord, head_dim: int, length: int) -> Iterator[Turn]:
    """Every way in which this site may turn its queries and keys, our own first.

    Args:
        length: Positions from 0 that our own angles are for.
    """
    for cos, sin in _own_angles(record, head_dim, length):
        yield Turn(cos, sin, own=True, interleaved=False)
        yield Turn(cos, sin, own=True, interleaved=True)
        # NanoChat turns the other way round.
        yield Turn(cos, -sin, own=True, interleaved=False)
    yield from given_turns(record, head_dim)


def given_turns(record: SiteRecord, head_dim: int) -> Iterator[Turn]:
    """The turns that the angles among a module's arguments can mean.

    They come with an angle a pair, or with each pair's angle twice: in both halves, or side by side.
    """
    for cos, sin in record.rotations:
        if cos.shape != sin.shape:
            continue
        both = _squeezed(cos), _squeezed(sin)
        if both[0].ndim not in (2, 3):
            continue
        half = cos.shape[-1] // 2
        for interleaved in (False, True):
            if cos.shape[-1] <= head_dim // 2:
                yield Turn(*both, own=False, interleaved=interleaved)
            yield Turn(both[0][..., :half], both[1][..., :half], own=False, interleaved=interleaved)
            yield Turn(both[0][..., ::2], both[1][..., ::2], own=False, interleaved=interleaved)


def stated_turn(record: SiteRecord, found: Turn | None, head_dim: int, length: int, dtype: torch.dtype) -> Turn | None:
    """Our own turn where the config states a scheme that is ours and the model's angles are others; None otherwise.

    Args:
        found: The turn that gives the model's numbers, None where that is none at all.
    """
    if found is not None and found.own:
        return None
    given = list(given_turns(record, head_dim))
    if found is None:
        # Layers without positions may be handed angles that they do not use; such as turn nothing are another matter.
        if not given or not _turns_nothing(given[0]):
            return None
        found = given[0]
    for cos, sin in _own_angles(record, head_dim, length):
        if _on_one_axis(record) and cos.shape[-1] == found.cos.shape[-1]:
            ours = replace(found, cos=cos, sin=sin, own=True)
            return None if same_angles(ours, found, dtype) else ours
    return None


def same_angles(a: Turn, b: Turn, dtype: torch.dtype) -> bool:
    """Whether two turns have the same cosines and sines, up to the rounding of a dtype."""
    length = min(a.cos.shape[-2], b.cos.shape[-2])
    limit = _SAME_ANGLES.get(dtype, 1e-4)
    pairs = ((a.cos, b.cos), (a.sin, b.sin))
    return all(float((x[..., :length, :] - y[..., :length, :]).abs().max()) <= limit for x, y in pairs)


def states_rotary(record: SiteRecord, head_dim: int) -> bool:
    """Whether the site was handed angles, and the config states a scheme on one axis of positions that is ours."""
    ours = next(_own_angles(record, head_dim, 1), None)
    return bool(record.rotations) and _on_one_axis(record) and ours is not None


def _turns_nothing(turn: Turn) -> bool:
    return bool((turn.sin == 0).all()) and turn.sin.shape[-2] > 1


def _on_one_axis(record: SiteRecord) -> bool:
    """Whether positions are numbers from 0 on: not rows and columns of an image, or several axes in sections."""
    axis = record.site.query_axis
    if axis not in ("text", "decoder", "audio") or (axis != "audio" and record.mixed):
        return False
    if any("section" in name for parameters, _ in _own_parameters(record) for name in parameters):
        return False
    given = record.arguments.get("position_ids")
    if not isinstance(given, Tensor):
        return True
    return given.ndim <= 2 and torch.equal(given.cpu(), torch.arange(given.shape[-1]).expand_as(given))


def _squeezed(tensor: Tensor) -> Tensor:
    """float32 without axes of size one before the last two, as far as more than two are left."""
    tensor = to_float(tensor)
    while tensor.ndim > 3 or (tensor.ndim == 3 and tensor.shape[0] == 1):
        if 1 not in tensor.shape[:-1]:
            break
        tensor = tensor.squeeze(tensor.shape.index(1))
    return tensor


# ------------------------------------------------------------------ our own angles
def _own_angles(record: SiteRecord, head_dim: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """cos and sin, (length, pairs), for each reading of the site's rope parameters."""
    for frequencies, factor in _frequencies(record, head_dim, length):
        # Models compute angles in float32; at high positions that is where differences come from.
        cos, sin = rotary_cos_sin(np.arange(length), frequencies.astype(np.float32), factor)
        yield torch.from_numpy(cos), torch.from_numpy(sin)


def _frequencies(record: SiteRecord, head_dim: int, length: int) -> Iterator[tuple[Frequencies, float]]:
    for parameters, limit in _own_parameters(record):
        with suppress(ValueError):  # a scheme that is not ours
            yield rotary_frequencies(parameters, head_dim, max_position_embeddings=limit, seq_len=length)
    rotary_dim = getattr(record.config, "rotary_dim", None)
    if isinstance(rotary_dim, int) and 0 < rotary_dim <= head_dim:
        # GPT-J's config, older than rope parameters, says how many dimensions turn; the base is RoFormer's.
        yield default_frequencies(10000.0, rotary_dim), 1.0


def _own_parameters(record: SiteRecord) -> list[tuple[Mapping[str, Any], int | None]]:
    """The rope parameters that the config gives for this site's layer, as it says them and without a partial factor."""
    config = record.config
    given = getattr(config, "rope_parameters", None)
    if config is None or not isinstance(given, Mapping):
        return []
    kind = _layer_type(config, record.site.layer)
    if kind is not None and isinstance(given.get(kind), Mapping):
        given = given[kind]
    if any(isinstance(v, Mapping) for v in given.values()):
        return []
    limit = getattr(config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) else None
    factor = getattr(config, "partial_rotary_factor", None)
    stated = {**({"partial_rotary_factor": factor} if factor is not None else {}), **given}
    plain = {k: v for k, v in stated.items() if k != "partial_rotary_factor"}
    return [(stated, limit)] if plain == stated else [(stated, limit), (plain, limit)]


def _layer_type(config: PreTrainedConfig, layer: int) -> str | None:
    """What the config calls the kind of this layer, such as `sliding_attention`; None where it has no kinds."""
    types = getattr(config, "layer_types", None)
    return str(types[layer]) if isinstance(types, list | tuple) and 0 <= layer < len(types) else None
