"""What a model gives for an input: all numbers of a forward pass, or the logits of every step of a generation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Outputs = dict[str, Tensor]
NEW_TOKENS = 6
TOKENS = "tokens"
_SEED = 0


def forward(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Outputs:
    """Every floating-point tensor that one forward pass gives, by its path in the output; caches and attention are left
    out, because their shapes follow the heads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)  # some models draw masks in evaluation mode, too
        output = model(**_copies(inputs))
    return dict(_tensors("", output))


def generated(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Outputs:
    """The logits of every greedy step with a cache, and under `TOKENS` what was chosen."""
    given = {n: t for n, t in _copies(inputs).items() if not n.startswith("decoder_")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        output: Any = model.generate(  # type: ignore[operator]  # `can_generate` has looked
            **given,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
        )
    steps = {f"step {i}": logits for i, logits in enumerate(output.logits)}
    return steps | {TOKENS: output.sequences[:, -len(steps) :]}


def comparable(wanted: Outputs, given: Outputs) -> tuple[Outputs, Outputs]:
    """Two generations up to the step where they first choose other tokens: from there on they read other texts.

    If that is no tie, the logits of this step differ.
    """
    if TOKENS not in wanted or TOKENS not in given or wanted[TOKENS].shape != given[TOKENS].shape:
        return wanted, given
    same = (wanted[TOKENS] == given[TOKENS]).all(dim=0).tolist()
    steps = [f"step {i}" for i in range(len(same)) if all(same[:i])]
    return {n: wanted[n] for n in steps}, {n: given[n] for n in steps}


def _copies(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Some models write into what they are given."""
    return copy.deepcopy(dict(inputs))


def can_generate(model: PreTrainedModel) -> bool:
    """Whether the model's class generates."""
    return hasattr(model, "generate") and bool(model.can_generate())


def _tensors(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if "attentions" not in name and name != "past_key_values":
                yield from _tensors(f"{path}.{name}", part)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _tensors(f"{path}.{i}", part)
