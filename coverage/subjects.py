"""What is measured: a tiny model of each type with inputs that it accepts, and which of its tokens are real.

The tiny models come from a folder outside the project with a module `tiny_models`: `iter_model_types()`,
`tiny_model(model_type)` and `dummy_inputs(model_type, model)`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

# Every how many tokens one counts as special, so that metrics of special tokens have something to measure.
_SPECIAL = 5

# Arguments that say how many images or sounds share one long sequence: that sequence is one example.
_PACKED = ("grid", "cu_seqlens", "feature_lens")

# No initial weight is as large.
_HUGE = 1e3

# Types whose decoder's mask is not one of its own text, with what it is.
_DECODER_MASKS = {"diffusion_gemma": "the mask covers the encoder's tokens, too"}


@dataclass(frozen=True)
class Tokens:
    """One axis of an attention matrix.

    Attributes:
        lengths: int64, (batch,): real tokens, padding is on the right.
        special: bool, (batch, n).
    """

    lengths: NDArray[np.int64]
    special: NDArray[np.bool_]

    @staticmethod
    def of(mask: NDArray[Any]) -> Tokens:
        """The axis of an attention mask (batch, n); every fifth token stands for a special one."""
        special = np.broadcast_to(np.arange(mask.shape[1]) % _SPECIAL == 0, mask.shape)
        return Tokens(mask.astype(bool).sum(axis=1), special & mask.astype(bool))

    @staticmethod
    def plain(batch: int, n: int) -> Tokens:
        """Real positions, none of them special: patches of an image, frames of a sound."""
        return Tokens(np.full(batch, n), np.zeros((batch, n), bool))


@dataclass(frozen=True)
class Subject:
    """A model with one batch.

    Attributes:
        size: Examples in the batch.
        axes: Its texts, by axis: `text`, `decoder`.
    """

    model: PreTrainedModel
    inputs: dict[str, Any]
    size: int
    axes: dict[str, Tokens]

    def run_inputs(self) -> dict[str, Any]:
        """A copy for one run, since some models write into their inputs; the same random numbers for each."""
        torch.manual_seed(0)
        return deepcopy(self.inputs)


def load_library(folder: Path) -> ModuleType:
    """The module `tiny_models` of a folder."""
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    return importlib.import_module("tiny_models")


def tame(model: PreTrainedModel) -> PreTrainedModel:
    """The model without NaN or huge weights: some classes leave a weight as the memory happened to be."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not bool((parameter.abs() < _HUGE).all()):
                parameter.copy_(parameter.nan_to_num(0, 0, 0).clamp(-1, 1))
    return model


def subject_of(model: PreTrainedModel, inputs: dict[str, Any]) -> Subject:
    """A model with inputs that it accepts; a decoder's second text gets padding too, where the model takes a mask."""
    inputs = {name: value for name, value in inputs.items() if value is not None and name != "use_cache"}
    inputs |= _decoder_padding(model, inputs)
    return Subject(model, inputs, _size(inputs), _axes(inputs))


def _decoder_padding(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor]:
    ids = inputs.get("decoder_input_ids")
    if ids is None or "decoder_attention_mask" in inputs or model.config.model_type in _DECODER_MASKS:
        return {}
    takes = "decoder_attention_mask" in inspect.signature(model.forward).parameters
    if not takes or ids.ndim != 2 or ids.shape[0] != _size(inputs) or ids.shape[0] < 2:
        return {}
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"decoder_attention_mask": mask}


def _size(inputs: dict[str, Any]) -> int:
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim > 1}
    if "input_ids" in tensors:
        return int(tensors["input_ids"].shape[0])
    if any(word in name for name in inputs for word in _PACKED):
        return 1
    return int(next(iter(tensors.values())).shape[0]) if tensors else 1


def _axes(inputs: dict[str, Any]) -> dict[str, Tokens]:
    axes = {}
    for axis, prefix in (("text", ""), ("decoder", "decoder_")):
        ids, mask = inputs.get(f"{prefix}input_ids"), inputs.get(f"{prefix}attention_mask")
        if not isinstance(ids, Tensor) or ids.ndim not in (2, 3):
            continue
        shape = ids.shape[:2]
        fits = isinstance(mask, Tensor) and mask.shape == shape
        axes[axis] = Tokens.of(mask.numpy() if fits else np.ones(shape))
    return axes


def modality_of(subject: Subject) -> str:
    """A rough group for the table, from what the model takes."""
    takes = inspect.signature(subject.model.forward).parameters
    names = set(subject.inputs)
    media = _media(names) or _media(takes)
    if "past_values" in names:
        return "time series"
    if "input_ids" in takes and media:
        return "multimodal"
    if _media(names) in ("vision", "audio"):
        return _media(names)
    if "decoder_input_ids" in names:
        return "encoder-decoder"
    return "text" if "input_ids" in names else "other"


def _media(names: Any) -> str:
    if any("pixel" in n or n in ("flattened_patches", "grid_thw", "image_grid_thw") for n in names):
        return "vision"
    sounds = ("input_features", "input_values", "audio_values", "feature_lens")
    return "audio" if any(n in sounds for n in names) else ""
