"""Finding what the tokens of images and sounds are: patches of a grid, frames of a spectrogram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.heads.medium import Heard, Medium, Seen
from headscope.models.inputs import Batch
from headscope.models.loading import LoadedModel
from headscope.models.sites import Site
from headscope.results import AttentionMap

# A class token, a distillation token and registers: no model has many more beside its patches.
_MOST_BESIDE = 32
_BANDS = 80


def media_of(
    loaded: LoadedModel, batches: Sequence[Batch], sites: Sequence[Site], maps: Sequence[AttentionMap]
) -> dict[str, Medium]:
    """For each stack whose keys are no text, what they lie on: the image or sound of the user's first example.

    Args:
        sites: The sites that the maps are of.
        maps: That example's maps; not none.
    """
    found: dict[str, Medium] = {}
    batch = next(batch for batch in batches if 0 in batch.order)
    row = batch.order.index(0)
    for site in {site.stack: site for site in sites}.values():
        sizes = {one.tokens or one.weights.shape[1:] for one in maps if one.stack == site.stack}
        if site.key_axis in batch.axes or not sizes:
            continue
        if "pixel_values" in batch.inputs and site.key_axis != "audio":
            found[site.stack] = _seen(loaded, batch.inputs["pixel_values"], row, site, sizes)
        for name in ("input_features", "input_values"):
            if name in batch.inputs and site.key_axis != "vision":
                found[site.stack] = _heard(loaded, batch.inputs[name], row, site, sizes)
    return found


# ------------------------------------------------------------------ images
def _seen(loaded: LoadedModel, values: Tensor, row: int, site: Site, sizes: set[tuple[int, ...]]) -> Medium:
    config = _config(loaded, site, "patch_size")
    if values.dim() != 4 or config is None:
        return "this model's images are not cut into one grid of patches"
    height, width = (int(n) for n in values.shape[-2:])
    sides = config.patch_size if isinstance(config.patch_size, list | tuple) else (config.patch_size,) * 2
    grid = (height // int(sides[0]), width // int(sides[1]))
    after = int(getattr(config, "num_detection_tokens", 0) or 0)
    for queries, keys in sorted(sizes):
        beside = keys - grid[0] * grid[1] - after
        if (queries != keys and not site.cross) or not 0 <= beside <= _MOST_BESIDE or len(sizes) > 1:
            shapes = " and ".join(f"{q} × {k}" for q, k in sorted(sizes))
            return f"attention of {shapes} tokens is not that of an image of {grid[0]} × {grid[1]} patches"
    # What is left at the edges belongs to no patch.
    pixels = _pixels(loaded, values[row])[: grid[0] * int(sides[0]), : grid[1] * int(sides[1])]
    names = _names(beside, int(getattr(config, "num_register_tokens", 0) or 0))
    return Seen(pixels, grid, names, tuple(f"detection {i}" for i in range(after)), not site.cross)


def _config(loaded: LoadedModel, site: Site, name: str) -> Any:
    """The config nearest above a site that has a value of this name; None where there is none."""
    parts = site.path.split(".")
    for end in range(len(parts), -1, -1):
        config = getattr(loaded.model.get_submodule(".".join(parts[:end])), "config", None)
        if getattr(config, name, None) is not None:
            return config
    return None


def _names(count: int, registers: int) -> tuple[str, ...]:
    """Tokens before the patches: a class token, others such as that of distillation, and registers last."""
    if count <= registers:
        return tuple(f"register {i}" for i in range(count))
    others = tuple(f"token {i}" for i in range(1, count - registers))
    return ("class", *others, *(f"register {i}" for i in range(registers)))


def _pixels(loaded: LoadedModel, values: Tensor) -> NDArray[np.uint8]:
    """(channel, height, width) as the model saw it, made colours again: uint8, (height, width, 3)."""
    image = values.detach().float().cpu().numpy()
    image = image[:3] if len(image) >= 3 else np.repeat(image[:1], 3, axis=0)
    processor = getattr(loaded.processor, "image_processor", loaded.processor)
    mean, std = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if getattr(processor, "do_normalize", False) and mean is not None and std is not None:
        image = image * np.reshape(std, (-1, 1, 1)) + np.reshape(mean, (-1, 1, 1))
    elif image.min() < 0 or image.max() > 1:
        image = (image - image.min()) / max(float(np.ptp(image)), 1e-12)
    return (255 * image.clip(0, 1)).round().astype(np.uint8).transpose(1, 2, 0)


# ------------------------------------------------------------------ sounds
def _heard(loaded: LoadedModel, values: Tensor, row: int, site: Site, sizes: set[tuple[int, ...]]) -> Medium:
    keys = {size[1] for size in sizes}
    count = max(keys)
    raw = values.dim() == 2
    if len(keys) > 1 or values.dim() not in (2, 3):
        return "the layers' tokens are no common frames of the sound"
    sound = values[row].detach().float().cpu()
    config = _config(loaded, site, "num_mel_bins") or _config(loaded, site, "input_feat_per_channel")
    frames = sound if raw else _bands_first(sound, config)
    length = frames.shape[-1]
    step = length / count
    # A stack of strided convolutions makes one token of every so many frames, less some at the edges.
    if not raw and abs(length - round(step) * count) > max(4, 2 * round(step)):
        return f"{count} tokens do not divide {length} frames evenly"
    if raw and abs(length - _stride(loaded, site) * count) > 2 * _stride(loaded, site):
        return f"{count} tokens do not divide {length} samples evenly"
    queries = not site.cross and all(size == (count, count) for size in sizes)
    spectrogram = _spectrogram(frames) if raw else frames
    return Heard(spectrogram.numpy().astype(np.float32), count, queries, _seconds(loaded, length, raw))


def _bands_first(features: Tensor, config: Any) -> Tensor:
    """(band, frame), whichever way round features come."""
    bands = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None)
    first, last = features.shape
    turned = last == bands if bands in (first, last) and first != last else last < first
    return features.T.contiguous() if turned else features


def _stride(loaded: LoadedModel, site: Site) -> int:
    """Samples a token, of a model that reads the waveform; one where its config does not tell."""
    config = _config(loaded, site, "conv_stride")
    strides = getattr(config, "conv_stride", (1,))
    return int(np.prod(strides))


def _spectrogram(samples: Tensor) -> Tensor:
    """(band, frame): logarithms of power, in windows of 25 ms each 10 ms at 16 kHz, in equal bands up to the top."""
    size = min(400, len(samples))
    window = torch.hann_window(size)
    spectrum = torch.stft(samples, size, max(1, size * 2 // 5), window=window, center=False, return_complex=True)
    power = torch.nn.functional.adaptive_avg_pool1d(spectrum.abs().square().T, min(_BANDS, len(spectrum))).T
    return power.clamp(min=float(power.max()) * 1e-8 + 1e-20).log10()


def _seconds(loaded: LoadedModel, length: int, raw: bool) -> float | None:
    extractor = getattr(loaded.processor, "feature_extractor", loaded.processor)
    rate = getattr(extractor, "sampling_rate", None)
    hop = 1 if raw else getattr(extractor, "hop_length", None)
    return length * hop / rate if isinstance(rate, int) and isinstance(hop, int) and rate > 0 else None
