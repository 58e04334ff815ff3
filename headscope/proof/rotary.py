"""Rotary positions of a site: our own angles from its config, else those that the model handed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from headscope.attention.frequencies import rotary_frequencies
from headscope.attention.rotary import rotary_cos_sin
from headscope.models.sites import Site
from headscope.proof.record import SiteRecord


@dataclass(frozen=True)
class Rotation:
    """Angles and how they are applied.

    Attributes:
        own: Computed from the config by our formulas; False where the model's own tensors are taken.
        index: Which of the site's own angles, or which rotation among its arguments.
        interleaved: Pairs of neighbours instead of half-split pairs.
        stride: With borrowed angles: pairs are every second column (2), or the first half of the columns (1); 0 takes
            all columns.
    """

    own: bool
    index: int
    interleaved: bool
    stride: int = 0


def rotations(record: SiteRecord, head_dim: int) -> Iterator[Rotation]:
    """Every way in which this site may turn its queries and keys, our own first."""
    for index in range(len(_own_parameters(record.site))):
        for interleaved in (False, True):
            yield Rotation(True, index, interleaved)
    for index, (cos, _) in enumerate(record.rotations):
        for interleaved in (False, True):
            if cos.shape[-1] <= head_dim // 2:
                yield Rotation(False, index, interleaved)
            yield Rotation(False, index, interleaved, 1)
            yield Rotation(False, index, interleaved, 2)


def angles(rotation: Rotation, record: SiteRecord, head_dim: int, length: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin, (n, m) or (batch, n, m); None where they do not fit."""
    if rotation.own:
        return _own(record.site, rotation.index, head_dim, length)
    cos, sin = (_cut(t, rotation.stride) for t in record.rotations[rotation.index])
    fits = cos.shape == sin.shape and cos.shape[-2] == length and 2 * cos.shape[-1] <= head_dim
    return (cos, sin) if fits else None


def _cut(tensor: Tensor, stride: int) -> Tensor:
    tensor = tensor.detach().float().cpu()
    while tensor.ndim > 3 or (tensor.ndim == 3 and tensor.shape[0] == 1):
        if 1 not in tensor.shape[:-1]:
            break
        tensor = tensor.squeeze(tensor.shape.index(1))
    half = tensor.shape[-1] // 2
    return tensor if stride == 0 else tensor[..., :half] if stride == 1 else tensor[..., ::2]


def _own(site: Site, index: int, head_dim: int, length: int) -> tuple[Tensor, Tensor] | None:
    parameters, limit = _own_parameters(site)[index]
    try:
        frequencies, factor = rotary_frequencies(parameters, head_dim, max_position_embeddings=limit, seq_len=length)
    except ValueError:
        return None
    # Models compute angles in float32; at high positions that is where differences come from.
    cos, sin = rotary_cos_sin(np.arange(length), frequencies.astype(np.float32), factor)
    return torch.from_numpy(cos), torch.from_numpy(sin)


def _own_parameters(site: Site) -> list[tuple[Mapping[str, Any], int | None]]:
    """The rope parameters that the config gives for this site's layer, as it says them and without a partial factor."""
    config = getattr(site.module, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return []
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, Mapping):
        return []
    kind = _layer_type(config, site)
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


def _layer_type(config: PreTrainedConfig, site: Site) -> str | None:
    types = getattr(config, "layer_types", None)
    if isinstance(types, list | tuple) and 0 <= site.layer < len(types):
        return str(types[site.layer])
    return None
