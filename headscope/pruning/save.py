"""Saving a pruned model in one of four forms, and loading it again before it counts as saved."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from headscope.errors import CheckError, InputError, ModelError, is_disk_full, is_out_of_memory
from headscope.models.checkpoint import first_line
from headscope.models.loading import load_model, load_plainly, wrap_model
from headscope.models.model_classes import auto_name
from headscope.models.quiet import quiet
from headscope.pruning.directory import check_directory, new_directory
from headscope.pruning.plan import current_plan
from headscope.pruning.probes import probes
from headscope.pruning.proof import prove
from headscope.pruning.remote import module_forgotten, remote_auto, write_remote_code
from headscope.pruning.report import Equivalence
from headscope.pruning.restore import restore
from headscope.pruning.save_report import FORMS, Form, SaveReport
from headscope.pruning.saved import KEY, plan_to_dict
from headscope.pruning.uniform import Uniform, as_uniform

MASKED_NOTE = "masked: all shapes are kept, so it is neither smaller nor faster"


def save_pruned(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    form: Form = "structural",
    pad: bool = False,
    force: bool = False,
    tokenizer: Any = None,
    processor: Any = None,
    max_shard_size: int | str | None = None,
) -> SaveReport:
    """Save a pruned model; it is loaded again and compared, and only then has `directory` anything in it.

    Args:
        model: Pruned by `headscope.prune_heads`, or loaded from a pruned directory. It is as before afterwards.
        directory: Must not exist, or be empty.
        form: `structural`: smaller weights, read by `headscope.load`. `remote-code`: the same with a modelling file of
            its own, for `trust_remote_code=True`. `uniform`: a plain checkpoint, where all layers have equally many
            heads left and the model's class can be told so. `masked`: a plain checkpoint in which removed heads are
            zero.
        pad: For `uniform`: give each layer as many heads as the largest has, zeros where it has fewer.
        force: Replace a model's directory that exists.
        tokenizer, processor: Saved too; by default those that `headscope.load` found, or that lie where the model came
            from.
        max_shard_size: Of one file of weights, as in transformers.

    Raises:
        InputError: The directory exists or cannot be created, there is no such form, or `uniform` is not possible; the
            message says why and what is.
        ModelError: The model cannot be saved or loaded again.
        CheckError: It loads as something else.
        ResourceError: The disk is full. Nothing is left behind after any of these.
    """
    if form not in FORMS:
        raise InputError(f"there is no form {form!r}", f"Forms: {', '.join(FORMS)}.")
    if pad and form != "uniform":
        raise InputError(f"padding is for uniform, not for {form}", "Leave --pad out, or use --save-as uniform.")
    check_directory(directory, force=force)
    saved, config, notes = _ready(model, form, pad)
    companions = wrap_model(model, tokenizer, processor)
    with new_directory(directory, force=force) as folder:
        _write(saved, config, folder, form, max_shard_size)
        with quiet():
            for companion in (companions.tokenizer, companions.processor):
                if companion is not None:
                    companion.save_pretrained(folder)
        # transformers may read the code of the file once more, for another attention implementation.
        with module_forgotten(folder):
            equivalence, params = _compare(model, folder, form, type(saved))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    plan = current_plan(saved)
    return SaveReport(str(directory), form, plan.heads, plan.zeroed, params, size, equivalence, tuple(notes))


# ------------------------------------------------------------------ what is written
def _ready(model: PreTrainedModel, form: Form, pad: bool) -> tuple[PreTrainedModel, PreTrainedConfig, list[str]]:
    """The model in the shapes of a form, its config as it is saved, and what the user should know."""
    plan = current_plan(model)
    if form == "masked":
        if plan.heads != plan.zeroed:
            model = copy.deepcopy(model)
            restore(model, plan.heads)
        return model, _config(model, form), [MASKED_NOTE]
    if form == "uniform":
        uniform: Uniform = as_uniform(model, pad=pad)
        config = _config(uniform.model, form, uniform.config, uniform.extra)
        return uniform.weights, config, list(uniform.notes)
    return model, _config(model, form), []


def _config(
    model: PreTrainedModel, form: Form, config: PreTrainedConfig | None = None, extra: dict[str, Any] | None = None
) -> PreTrainedConfig:
    """A config to save, with the plan and the form in it."""
    config = copy.deepcopy(model.config if config is None else config)
    if extra is None or extra:
        setattr(config, KEY, plan_to_dict(current_plan(model)) | {"form": form} | (extra or {}))
    elif hasattr(config, KEY):
        delattr(config, KEY)
    return config


def _write(
    model: PreTrainedModel, config: PreTrainedConfig, folder: Path, form: Form, max_shard_size: int | str | None
) -> None:
    arguments: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    # With code of its own, names are those that modules have: only classes of transformers rename them on loading.
    arguments["save_original_format"] = form != "remote-code"
    try:
        with quiet(), _saving_as(model, config):
            model.save_pretrained(folder, **arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"transformers does not save this model: {first_line(error)}", "try --save-as masked, or leave --output out"
        ) from error
    if form == "remote-code":
        write_remote_code(model, folder)


@contextmanager
def _saving_as(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[None]:
    """Within the block the model has another config, and says nothing of a quantization that it does not have any more.

    A dequantised model is dense, but transformers refuses to save it as long as its quantizer is there.
    """
    before = model.config
    own: dict[str, Any] = vars(model)
    dense = all(p.is_floating_point() for p in model.parameters())
    kept: dict[str, Any] = {
        name: own.pop(name) for name in ("hf_quantizer", "quantization_method") if dense and name in own
    }
    if kept and hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    model.config = config
    try:
        yield
    finally:
        model.config = before
        own.update(kept)


# ------------------------------------------------------------------ and read again
def _compare(model: PreTrainedModel, folder: Path, form: Form, cls: type[PreTrainedModel]) -> tuple[Equivalence, int]:
    """The model beside what its directory gives on the way that a user takes; the number of parameters there."""
    try:
        again = _load_again(model, folder, form, cls)
    except (InputError, ModelError):
        raise
    except Exception as error:  # whatever transformers raises: it does not load
        if is_out_of_memory(error) or is_disk_full(error):
            raise
        raise ModelError(
            f"saved as {form}, the model does not load again: {first_line(error)}", "try another --save-as"
        ) from error
    found = prove(model, again, {}, batches=probes(model))
    if not found.passed:
        why = "; ".join(found.failures) or f"outputs differ by {found.relative:.1e} of the largest"
        raise CheckError(
            f"saved as {form}, the model loads as something else: {why}",
            "Nothing was written. Save it in another form (--save-as).",
        )
    return found, again.num_parameters()


def _load_again(model: PreTrainedModel, folder: Path, form: Form, cls: type[PreTrainedModel]) -> PreTrainedModel:
    if form == "structural":
        return load_model(str(folder), own_class=True, device=str(model.device)).model
    if form == "remote-code":
        return load_plainly(folder, remote_auto(folder), device=model.device, trust_remote_code=True)
    return load_plainly(folder, auto_name(cls, model.config) or cls.__name__, device=model.device)
