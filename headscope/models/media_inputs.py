"""Images and sounds, alone or with a text, through the model's own processor; one example a batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.errors import InputError, ModelError
from headscope.models.checkpoint import first_line
from headscope.models.encoding import rendered
from headscope.models.loading import LoadedModel
from headscope.models.quiet import quiet
from headscope.models.signature import takes

# Pictures that are programs: Pillow hands them to Ghostscript, which runs them.
_PROGRAMS = {"EPS"}


def load_image(image: Any) -> Any:
    """An RGB image from a path; images in memory (PIL, array) are passed through.

    Raises:
        InputError: Pillow is not installed, or the file cannot be read as an image.
    """
    if not isinstance(image, str | Path):
        return image
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("reading images needs Pillow", "pip install 'headscope[vision]'") from error
    Image.init()
    try:
        with Image.open(image, formats=[name for name in Image.ID if name not in _PROGRAMS]) as opened:
            return opened.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # each format's reader raises what it likes, and files may be anything
        raise InputError(
            f"cannot read the image {image}: {first_line(error, 100)}",
            "give a PNG, JPEG or another file that Pillow reads",
        ) from error


def load_sound(sound: Any, rate: int) -> tuple[NDArray[np.float32], str | None]:
    """A mono sound at `rate` samples a second, float32, from a path; arrays are taken to have that rate already.

    Returns:
        The samples, and a warning where they were resampled (linearly).

    Raises:
        InputError: soundfile is not installed, the file cannot be read, or there are no samples.
    """
    if isinstance(sound, str | Path):
        samples, found = _read_sound(sound)
    else:
        samples, found = np.asarray(sound, dtype=np.float32), rate
    samples = samples if samples.ndim == 1 else samples.mean(axis=1)
    if not samples.size:
        raise InputError(
            "a sound is empty" if not isinstance(sound, str | Path) else f"the sound {sound} is empty",
            "give one with samples in it",
        )
    if found == rate:
        return samples.astype(np.float32), None
    seconds = len(samples) / found
    times = np.arange(max(1, round(seconds * rate))) / rate
    resampled = np.interp(times, np.arange(len(samples)) / found, samples).astype(np.float32)
    return resampled, f"{sound}: resampled linearly from {found} to {rate} Hz"


def _read_sound(path: str | Path) -> tuple[NDArray[np.float32], int]:
    try:
        import soundfile
    except ImportError as error:
        raise InputError("reading sounds needs soundfile", "pip install 'headscope[audio]'") from error
    try:
        with _silent_libraries():
            samples, rate = soundfile.read(str(path), dtype="float32")
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"cannot read the sound {path}: {first_line(error, 100)}", "give a WAV, FLAC, OGG or MP3 file"
        ) from error
    return samples, rate


@contextmanager
def _silent_libraries() -> Iterator[None]:
    """Nowhere is where libraries in C, which know nothing of `sys.stderr`, write their own complaints within it."""
    try:
        kept = os.dup(2)
    except OSError:  # closed: they have nowhere to write
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def media_example(
    loaded: LoadedModel, text: str | None, image: Any | None, sound: Any | None, *, chat: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """The forward's arguments for one example of images or sounds, with a text where the model takes both.

    Args:
        chat: Put the model's chat template around the text, and the image's and sound's places into it.

    Raises:
        InputError: A file cannot be read, or there is no chat template.
        ModelError: There is no processor, or it fails.
    """
    if loaded.processor is None:
        raise ModelError(
            f"{loaded.name} has no processor that loads (preprocessor_config.json)",
            "put its preprocessor files into the directory, or give ready tensors from Python",
        )
    arguments: dict[str, Any] = {}
    warnings: list[str] = []
    if image is not None:
        arguments["images"] = load_image(image)
    if sound is not None:
        rate = _sampling_rate(loaded.processor)
        samples, warning = load_sound(sound, rate)
        warnings += [warning] if warning else []
        arguments["audio" if _is_composite(loaded.processor) else "raw_speech"] = samples
        arguments["sampling_rate"] = rate
    if text is not None and chat:
        arguments |= _in_chat(loaded, text, image is not None, sound is not None)
    elif text is not None:
        arguments["text"] = _with_image_token(loaded.processor, text) if image is not None else text
    try:
        with quiet():
            encoded = loaded.processor(**arguments, return_tensors="pt")
    except Exception as error:  # processors fail in the class of whatever library they use
        raise ModelError(
            f"the processor of {loaded.name} fails: {first_line(error)}",
            "check that the input fits the model; --debug shows where it failed",
        ) from error
    tensors = {n: v for n, v in encoded.items() if isinstance(v, torch.Tensor) and takes(loaded.model, n)}
    return tensors, warnings


def _in_chat(loaded: LoadedModel, text: str, image: bool, sound: bool) -> dict[str, Any]:
    """A user's message of parts in the processor's chat template; its start token is not added twice."""
    if not getattr(loaded.processor, "chat_template", None):
        raise InputError(f"the processor of {loaded.name} has no chat template", "leave --chat out")
    kinds = [kind for kind, given in (("image", image), ("audio", sound)) if given]
    written = rendered(loaded, loaded.processor, [*({"type": k} for k in kinds), {"type": "text", "text": text}])
    start = getattr(getattr(loaded.processor, "tokenizer", None), "bos_token", None)
    twice = isinstance(start, str) and written.startswith(start)
    return {"text": written} | ({"add_special_tokens": False} if twice else {})


def _is_composite(processor: Any) -> bool:
    return getattr(processor, "tokenizer", None) is not None


def _sampling_rate(processor: Any) -> int:
    extractor = getattr(processor, "feature_extractor", processor)
    return int(getattr(extractor, "sampling_rate", 16_000))


def _with_image_token(processor: Any, text: str) -> str:
    """Put the image's place into a text that does not name it."""
    token = getattr(processor, "image_token", None)
    return text if not isinstance(token, str) or token in text else f"{token}\n{text}"
