"""Judging a checkpoint: what it left without weights, and what an error of transformers means in one line."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from safetensors import SafetensorError

from headscope.errors import HeadscopeError, ModelError, ResourceError, is_out_of_memory

# Parts that nothing on the way to an attention weight reads, so that a checkpoint may leave them out.
POOLERS = {"pooler", "pooling", "pooler_proj"}
HEADS = {
    "classifier", "classification_head", "cls", "final_logits_bias", "generator_lm_head", "generator_predictions",
    "head", "heads", "lm_head", "logit_bias", "logit_scale", "logit_scale_a", "logit_scale_t", "mask_emb",
    "mask_token", "masked_spec_embed", "output_projection", "pre_classifier", "pred_layer", "predictions", "proj_out",
    "projector", "qa_outputs", "score", "sequence_summary", "summary", "text_projection", "visual_projection",
    "vocab_layer_norm", "vocab_projector", "vocab_transform",
}  # fmt: skip


def judge_load_report(name: str, report: dict[str, Any]) -> tuple[list[str], tuple[str, ...]]:
    """Refuse a model with attention on random weights.

    Args:
        name: The model's name, for messages.
        report: What `from_pretrained(..., output_loading_info=True)` gives: missing and mismatched keys.

    Returns:
        Warnings, one line each, and the names of the harmless parameters that are newly initialised.

    Raises:
        ModelError: Weights that attention depends on are missing, or have another shape than the configuration says.
    """
    shapes = {key: (tuple(found), tuple(wanted)) for key, found, wanted in report["mismatched_keys"]}
    missing = sorted(set(report["missing_keys"]) | set(shapes))
    fatal = [key for key in missing if not _is_harmless(key)]
    if fatal:
        raise ModelError(
            f"{name}: {len(fatal)} weights that attention depends on are not in the checkpoint: "
            + _listed(_with_shape(key, shapes) for key in fatal),
            "the checkpoint is incomplete, was pruned, or does not belong to its config.json",
        )
    heads = [key for key in missing if not POOLERS & set(key.split("."))]
    warnings = [f"newly initialised, not in the checkpoint: {_listed(heads)}"] if heads else []
    return warnings, tuple(missing)


def _is_harmless(key: str) -> bool:
    """Whether `key` belongs to a head or pooler: outside the layer stacks, and not itself attention."""
    parts = key.split(".")
    if any("attn" in part or "attention" in part for part in parts):
        return False
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return bool((POOLERS | HEADS) & set(parts[:number]))


def _with_shape(key: str, shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    if key not in shapes:
        return key
    found, wanted = shapes[key]
    return f"{key} (has shape {found}, needs {wanted})"


def _listed(keys: Iterable[str], most: int = 3) -> str:
    names = list(keys)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def explain_load_error(name: str, error: BaseException, *, local: bool) -> HeadscopeError:
    """Turn whatever transformers raised into one line with a hint."""
    line = first_line(error)
    if isinstance(error, HeadscopeError):
        return error
    if is_out_of_memory(error):
        return ResourceError(f"{name}: out of memory while loading", "a smaller --dtype, or another --device")
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{name} needs Python code of its own to load, which is not run by default",
            "read that code, then allow it with --trust-remote-code",
        )
    if isinstance(error, SafetensorError):
        return ModelError(f"{name}: damaged weights: {line}", "download or copy model.safetensors again")
    if isinstance(error, pickle.UnpicklingError):
        return ModelError(
            f"{name}: the .bin file is damaged or holds more than tensors, and is not unpickled",
            "convert it to safetensors where it came from",
        )
    if isinstance(error, ImportError) or "pip install" in line:
        return ModelError(f"{name}: a package is missing: {line}", "install it and try again")
    hint = (
        "is it a complete model directory (config.json and weights)?"
        if local
        else "check the name, or give a directory"
    )
    return ModelError(f"{name} cannot be loaded: {line}", hint)


def first_line(error: BaseException, most: int = 240) -> str:
    """The first line of an error's text that says something, at most `most` characters of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    return line if len(line) <= most else line[: most - 1] + "…"
