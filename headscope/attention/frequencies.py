"""Frequencies of rotary positions, and the ways in which models stretch them to longer texts.

All start from RoFormer's inv_freq[t] = base^(−2t/d) for the d rotated dimensions of a head (arXiv 2104.09864,
section 3.2.2). A stretch by `factor` makes the slow pairs slower, so that a longer text stays within the angles that
the model was trained on, and differs in what it does with the fast ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Frequencies = NDArray[np.float64]
Parameters = Mapping[str, Any]


def rotary_frequencies(
    parameters: Parameters,
    head_dim: int,
    *,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
) -> tuple[Frequencies, float]:
    """Return a model's rotary frequencies from its rope parameters.

    Args:
        parameters: `rope_theta` (the base), `rope_type` ("default", "linear", "dynamic", "llama3", "yarn", "longrope",
            "proportional"; default "default"), `partial_rotary_factor` (share of a head that is rotated, default 1),
            and what the type needs; see the functions below. A value of None counts as missing.
        head_dim: Width of one head.
        max_position_embeddings: The model's length in tokens; "dynamic" needs it, and "yarn" and "longrope" do when no
            `factor` is given.
        seq_len: Length of the present text in tokens (highest position + 1), which "dynamic" and "longrope" look at;
            None for a text within the trained length.

    Returns:
        inv_freq (m,) in radians a token, for m = ⌊head_dim · partial_rotary_factor⌋ / 2 pairs, and the attention
        factor that multiplies cosines and sines.

    Raises:
        ValueError: Unknown `rope_type`, or a parameter that it needs is missing; the message names it.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    rope_type = given.get("rope_type", given.get("type", "default"))
    scheme = _SCHEMES.get(rope_type)
    if scheme is None:
        raise ValueError(f"rotary_frequencies: unknown rope_type {rope_type!r}; known: {', '.join(_SCHEMES)}")
    if max_position_embeddings is not None:
        given["max_position_embeddings"] = max_position_embeddings
    try:
        return scheme(given, head_dim, seq_len)
    except KeyError as error:
        raise ValueError(f"rotary_frequencies: rope_type {rope_type!r} needs {error.args[0]!r}") from None


def default_frequencies(base: float, rotary_dim: int) -> Frequencies:
    """Return base^(−2t / rotary_dim) for t = 0, 1, … (RoFormer, section 3.2.2): (rotary_dim / 2,)."""
    return base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)  # (m,)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 · mscale · ln(factor) + 1, or 1 without a stretch (YaRN, arXiv 2309.00071, section 3.4).

    DeepSeek multiplies the scale of its scores by yarn_mscale(factor, mscale_all_dim) squared instead.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _rotary_dim(given: Parameters, head_dim: int) -> int:
    return int(head_dim * given.get("partial_rotary_factor", 1.0))


def _plain(given: Parameters, head_dim: int) -> Frequencies:
    return default_frequencies(given["rope_theta"], _rotary_dim(given, head_dim))


def _default(given: Parameters, head_dim: int, seq_len: int | None) -> tuple[Frequencies, float]:
    return _plain(given, head_dim), 1.0


def _linear(given: Parameters, head_dim: int, seq_len: int | None) -> tuple[Frequencies, float]:
    """Position Interpolation (Chen et al. 2023, arXiv 2306.15595): positions divided by `factor`."""
    return _plain(given, head_dim) / given["factor"], 1.0


def _dynamic(given: Parameters, head_dim: int, seq_len: int | None) -> tuple[Frequencies, float]:
    """Dynamic NTK: past the trained length L the base itself grows with the text's length n.

    base · (factor · n / L − (factor − 1))^(d / (d − 2)); described in YaRN (arXiv 2309.00071), sections 3.1 and 3.3,
    as the community's "NTK-aware" and "dynamic NTK" scaling.
    """
    factor, trained = given["factor"], given["max_position_embeddings"]
    dim = _rotary_dim(given, head_dim)
    length = trained if seq_len is None else max(seq_len, trained)
    stretch = factor * length / trained - (factor - 1)
    return default_frequencies(given["rope_theta"] * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(given: Parameters, head_dim: int, seq_len: int | None) -> tuple[Frequencies, float]:
    """Llama 3.1's scaling, from its released code: by wavelength, with a smooth passage between.

    With r = original length / wavelength turns in the trained text: r above `high_freq_factor` keeps its frequency,
    r below `low_freq_factor` is divided by `factor`, and between them the two are mixed linearly in r.
    """
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    inv_freq = _plain(given, head_dim)  # (m,)
    turns = given["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # (m,)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)  # (m,)
    return keep * inv_freq + (1 - keep) * inv_freq / given["factor"], 1.0


def _yarn(given: Parameters, head_dim: int, seq_len: int | None) -> tuple[Frequencies, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), "NTK-by-parts" of section 3.2 with the ramp over pair numbers.

    Pairs with more than `beta_fast` (32) turns in the trained length keep their frequency, those with fewer than
    `beta_slow` (1) are divided by `factor`, and between them the two are mixed linearly in the pair's number. The two
    bounds are rounded outwards unless `truncate` is False. `attention_factor` if given, else from `factor` by
    `yarn_mscale`, or with `mscale` and `mscale_all_dim` the quotient of the two (DeepSeek).
    """
    base, original = given["rope_theta"], given["original_max_position_embeddings"]
    dim = _rotary_dim(given, head_dim)
    factor = given["factor"] if "factor" in given else given["max_position_embeddings"] / original

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(given.get("beta_fast") or 32), pair_with(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # an empty ramp becomes a step
    slow = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)  # (m,)
    inv_freq = default_frequencies(base, dim)  # (m,)
    return slow * inv_freq / factor + (1 - slow) * inv_freq, _yarn_attention_factor(given, factor)


def _yarn_attention_factor(given: Parameters, factor: float) -> float:
    if "attention_factor" in given:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return yarn_mscale(factor, given["mscale"]) / yarn_mscale(factor, given["mscale_all_dim"])
    return yarn_mscale(factor)


def _longrope(given: Parameters, head_dim: int, seq_len: int | None) -> tuple[Frequencies, float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753, section 3): a searched divisor for every pair.

    `short_factor` up to the original length, `long_factor` for longer texts. The attention factor is
    √(1 + ln(factor) / ln(original length)) where `factor` is the stretch, unless `attention_factor` is given.
    """
    original = given["original_max_position_embeddings"]
    is_long = seq_len is not None and seq_len > original
    divisors = np.asarray(given["long_factor" if is_long else "short_factor"], dtype=np.float64)  # (m,)
    inv_freq = _plain(given, head_dim) / divisors  # (m,)
    if "attention_factor" in given:
        return inv_freq, float(given["attention_factor"])
    factor = given["factor"] if "factor" in given else given["max_position_embeddings"] / original
    return inv_freq, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _proportional(given: Parameters, head_dim: int, seq_len: int | None) -> tuple[Frequencies, float]:
    """Rotate a share of the pairs with the frequencies of the whole head, and leave the others at frequency 0.

    Unlike a plain partial rotation, the unrotated pairs take part in the pairing of the whole head (Gemma's
    long-range layers): m is head_dim / 2.
    """
    rotated = int(given.get("partial_rotary_factor", 1.0) * head_dim // 2)
    inv_freq = default_frequencies(given["rope_theta"], head_dim)  # (head_dim / 2,)
    inv_freq[rotated:] = 0.0
    return inv_freq / given.get("factor", 1.0), 1.0


_SCHEMES: dict[str, Callable[[Parameters, int, int | None], tuple[Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
