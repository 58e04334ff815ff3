"""Between the forms in which pruned models are saved, and from transformers 4's into ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headscope.errors import InputError
from headscope.models.loading import load_model
from headscope.models.pruned import pruned_state, set_pruned_state
from headscope.models.sites import find_sites
from headscope.pruning.directory import check_directory
from headscope.pruning.plan import current_plan, make_plan
from headscope.pruning.save import save_pruned
from headscope.pruning.save_report import Form, SaveReport
from headscope.pruning.surgery import apply


def convert(
    model: str | Path,
    output: str | Path,
    *,
    form: Form = "structural",
    pad: bool = False,
    force: bool = False,
    tokenizer: Any = None,
    **options: Any,
) -> SaveReport:
    """Save a pruned checkpoint in another form.

    Args:
        model: A directory (or hub id) that was saved in any form, or a checkpoint of transformers 4 whose config has
            `pruned_heads`.
        output, form, pad, force: As in `save_pruned`. For all forms but `masked`, heads that are only zeroed are
            removed where that is possible.
        tokenizer: Another one than that of the checkpoint.
        options: More arguments of `headscope.models.loading.load_model`: `revision`, `device`, `dtype`,
            `trust_remote_code`.

    Raises:
        InputError: No heads were removed from the checkpoint, or as `save_pruned`.
        ModelError, CheckError, ResourceError: As `load_model` and `save_pruned`.
    """
    check_directory(output, force=force)
    loaded = load_model(str(model), own_class=True, tokenizer=tokenizer, **options)
    if not current_plan(loaded.model).heads:
        raise InputError(f"no heads were removed from {loaded.name}", "Remove some with headscope prune.")
    notes = () if form == "masked" else remove_zeroed(loaded.model)
    report = save_pruned(
        loaded.model,
        output,
        form=form,
        pad=pad,
        force=force,
        tokenizer=loaded.tokenizer,
        processor=loaded.processor,
    )
    return replace(report, notes=(*loaded.warnings, *notes, *report.notes))


def remove_zeroed(model: PreTrainedModel) -> tuple[str, ...]:
    """Remove heads that are only zeroed, in place, as far as the rest stays a rectangle of heads.

    Returns:
        Notes, one line each, on those that stay.
    """
    zeroed = current_plan(model).zeroed
    if not zeroed:
        return ()
    for site in find_sites(model):
        state = pruned_state(site.module)
        if state is not None:
            set_pruned_state(site.module, replace(state, zeroed=()))
    plan = make_plan(model, zeroed, allow_empty=True, ragged="mask")
    apply(model, plan)
    return plan.notes
