"""Text that the model writes itself, greedily: a decoder's, or what continues a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headscope.errors import InputError, ModelError
from headscope.models.batches import TokenSequence, group_by_length
from headscope.models.checkpoint import first_line
from headscope.models.loading import LoadedModel
from headscope.models.model_tensors import on_device, padding, text_batch
from headscope.models.quiet import quiet
from headscope.models.text_inputs import describe_ids
from headscope.models.tokens import TokenReader

_CONTINUE = "continue a text"
_HINT = "give a causal language model with its output head, or leave --generate out"


def greedy(
    loaded: LoadedModel, inputs: Mapping[str, Tensor], most: int, what: str, hint: str, **more: Any
) -> list[list[int]]:
    """Token numbers that the model generates, the token of the largest logit each time.

    Whatever else the model's generation settings say (penalties, forced or suppressed tokens) is kept.

    Args:
        inputs: Arguments of `generate`, on the model's device.
        most: New tokens at most.
        what: What it is for, for errors: a verb.
        more: More arguments of `generate`.

    Raises:
        InputError: The model cannot generate, or its output head is newly initialised.
        ModelError: Generation fails.
    """
    model: Any = loaded.model
    if not (hasattr(model, "generate") and model.can_generate()):
        raise InputError(f"{type(model).__name__} cannot {what}", hint)
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    if any(key.startswith(f"{name}.") for key in loaded.missing for name in names):
        raise InputError(f"{loaded.name} has no trained output head to {what}", hint)
    try:
        with quiet(), torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=most, do_sample=False, num_beams=1, **more)
    except Exception as error:  # generation fails in the class of whatever the model is missing
        raise ModelError(f"{loaded.name} cannot {what}: {first_line(error)}", hint) from error
    rows: list[list[int]] = getattr(output, "sequences", output).tolist()
    return rows


def check_continues(loaded: LoadedModel) -> None:
    """Refuse models that do not write texts: encoders, and decoders without an output head.

    Raises:
        InputError: Names the model, and what it is loaded as.
    """
    model: Any = loaded.model
    # An encoder's checkpoint in a class that generates lacks more than the head.
    if not (hasattr(model, "generate") and model.can_generate()) or loaded.missing:
        raise InputError(f"{loaded.name} cannot {_CONTINUE}: it is no language model with a trained output head", _HINT)


def continued(
    loaded: LoadedModel, sequences: Sequence[TokenSequence], most: int, batch_size: int | None = None
) -> tuple[list[TokenSequence], list[str]]:
    """Let the model continue texts. Only texts of one length share a batch, so that no padding plays a part.

    Returns:
        The sequences with at most `most` more tokens (fewer where the end token is among them), and a note.

    Raises:
        ModelError: Generation fails.
    """
    reader = None if loaded.tokenizer is None else TokenReader(loaded.tokenizer)
    result = list(sequences)
    for group in group_by_length([len(s) for s in sequences], batch_size, equal_only=True):
        inputs, _ = text_batch(loaded, [sequences[i] for i in group])
        rows = greedy(loaded, on_device(loaded, inputs), most, _CONTINUE, _HINT, pad_token_id=padding(loaded))
        for i, row in zip(group, rows, strict=True):
            result[i] = _with_more(loaded, reader, sequences[i], _to_end(loaded, row[len(sequences[i]) :]))
    return result, [_note(loaded, result[0].ids[len(sequences[0]) :], several=len(result) > 1)]


def continued_tensors(loaded: LoadedModel, tensors: Mapping[str, Tensor], most: int) -> tuple[dict[str, Tensor], str]:
    """The same for the ready tensors of one example, with images or sounds; what is added is text.

    Raises:
        ModelError: Generation fails.
    """
    ids = tensors["input_ids"]
    row = greedy(loaded, on_device(loaded, tensors), most, _CONTINUE, _HINT, pad_token_id=padding(loaded))[0]
    new = _to_end(loaded, row[ids.shape[1] :])
    result = dict(tensors)
    for name, value in tensors.items():
        if name == "input_ids":
            result[name] = torch.cat([value, torch.tensor([new], dtype=value.dtype)], dim=1)
        elif name == "cross_attention_mask":  # which images a token sees: those of the token before it
            result[name] = torch.cat([value, *[value[:, -1:]] * len(new)], dim=1)
        elif value.shape == ids.shape and not value.is_floating_point():
            more = value.new_full((1, len(new)), int(name == "attention_mask"))
            result[name] = torch.cat([value, more], dim=1)
    return result, _note(loaded, new, several=False)


def _with_more(
    loaded: LoadedModel, reader: TokenReader | None, sequence: TokenSequence, new: Sequence[int]
) -> TokenSequence:
    """The prompt's tokens keep what is known of them; a new piece may belong to their last word."""
    n = len(sequence)
    whole = describe_ids(loaded.model, reader, [*sequence.ids, *new])
    shift = sequence.words[-1] - whole.words[n - 1]
    types = sequence.type_ids
    return TokenSequence(
        whole.ids,
        (*sequence.special, *whole.special[n:]),
        (*sequence.labels, *whole.labels[n:]),
        (*sequence.words, *(number + shift for number in whole.words[n:])),
        None if types is None else (*types, *types[-1:] * len(new)),
    )


def _to_end(loaded: LoadedModel, new: Sequence[int]) -> list[int]:
    """Up to the first end token; behind it there is padding."""
    eos = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    ends = set(eos) if isinstance(eos, list | tuple) else {eos}
    stop = next((i + 1 for i, number in enumerate(new) if number in ends), len(new))
    return list(new[:stop])


def _note(loaded: LoadedModel, new: Sequence[int], *, several: bool) -> str:
    tokenizer = loaded.tokenizer
    text = " ".join(map(str, new)) if tokenizer is None else str(tokenizer.decode(list(new)))
    count = f"{len(new)} token" + ("s" if len(new) != 1 else "")
    return f"the model continued the text greedily by {count}: {text!r}" + (" …" if several else "")
