"""Which kinds of input were given, and whether the model takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from headscope.errors import InputError
from headscope.models.decoder_inputs import has_decoder
from headscope.models.loading import LoadedModel
from headscope.models.signature import AUDIO_INPUTS, IMAGE_INPUTS, takes, takes_any


def check_kinds(
    loaded: LoadedModel,
    texts: Sequence[str] | None,
    ids: Sequence[Sequence[int]] | None,
    decoder_texts: Sequence[str] | None,
    images: Sequence[Any] | None,
    audio: Sequence[Any] | None,
    tensors: Mapping[str, Tensor] | None,
) -> None:
    """Refuse what does not go together, and input that this model has no argument for.

    Raises:
        InputError: Names the kind of input, and what the model takes.
    """
    given = {"texts": texts, "ids": ids, "images": images, "audio": audio, "tensors": tensors}
    present = {kind: value for kind, value in given.items() if value is not None}
    for kind, value in present.items():
        if not len(value):
            raise InputError(f"{kind} is empty", "give at least one")
    if not present:
        raise InputError("no input is given", "give a text, token ids, an image or a sound")
    for a, b in (("texts", "ids"), ("ids", "images"), ("ids", "audio")):
        if a in present and b in present:
            raise InputError(f"{a} and {b} are both given", "give one of them")
    if tensors is not None and len(present) > 1:
        raise InputError("ready tensors are given together with other input", "give one of them")
    if decoder_texts is not None and not has_decoder(loaded):
        raise InputError(f"{loaded.name} has no decoder that reads a text of its own", "leave --decoder-text out")
    wanted = {"texts": ("input_ids",), "ids": ("input_ids",), "images": IMAGE_INPUTS, "audio": AUDIO_INPUTS}
    for kind in present.keys() & wanted.keys():
        if not takes_any(loaded.model, wanted[kind]):
            wanted_kinds = _wanted(loaded)
            hint = _HINTS.get(wanted_kinds, f"leave {_NAMES[kind]} out")
            raise InputError(f"{loaded.name} takes {wanted_kinds}, not {_NAMES[kind]}", hint)
    if hasattr(loaded.model, "get_text_features") and tensors is None:
        _check_pair(loaded, texts, images, audio)


_NAMES = {"texts": "text", "ids": "text", "images": "images", "audio": "sounds"}
_HINTS = {"images": "give one with --image", "sounds": "give one with --audio", "text": "give a text"}


def _wanted(loaded: LoadedModel) -> str:
    kinds = (("text", ("input_ids",)), ("images", IMAGE_INPUTS), ("sounds", AUDIO_INPUTS))
    return " and ".join(kind for kind, names in kinds if takes_any(loaded.model, names)) or "other input"


def _check_pair(
    loaded: LoadedModel, texts: Sequence[str] | None, images: Sequence[Any] | None, audio: Sequence[Any] | None
) -> None:
    """Models that compare texts with something run on both at once."""
    message = f"{loaded.name} compares texts with {_wanted(loaded).removeprefix('text and ')} and needs both"
    if takes_any(loaded.model, IMAGE_INPUTS) and images is None:
        raise InputError(message, "add an image with --image")
    if takes_any(loaded.model, AUDIO_INPUTS) and audio is None:
        raise InputError(message, "add a sound with --audio")
    if texts is None and takes(loaded.model, "input_ids"):
        raise InputError(message, "add a text")
