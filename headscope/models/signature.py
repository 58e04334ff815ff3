"""What a model's `forward` takes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from transformers import PreTrainedModel

IMAGE_INPUTS = ("pixel_values", "flattened_patches", "pixel_values_videos")
AUDIO_INPUTS = ("input_features", "input_values", "audio_values")


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether `model.forward` has an argument of this name (or takes anything, as a wrapper does)."""
    names = inspect.signature(model.forward).parameters
    return name in names or set(names) <= {"args", "kwargs"}


def takes_any(model: PreTrainedModel, names: Sequence[str]) -> bool:
    """Whether `model.forward` has at least one of these arguments."""
    return any(takes(model, name) for name in names)
