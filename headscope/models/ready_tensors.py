"""A caller's own tensors: checked, and shifted so that padding is on the right. The caller's are never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headscope.errors import InputError
from headscope.models.batches import TokenAxis
from headscope.models.limits import vocabulary_size
from headscope.models.loading import LoadedModel
from headscope.models.text_inputs import describe_ids
from headscope.models.tokens import TokenReader


def ready_axis(
    loaded: LoadedModel, tensors: Mapping[str, Tensor], prefix: str = ""
) -> tuple[dict[str, Tensor], TokenAxis | None]:
    """Shift one sequence axis of ready inputs to the left, so that padding ends up on the right.

    Args:
        loaded: The model and its tokenizer.
        tensors: Arguments of the model's forward; `input_ids` (batch, n) or `inputs_embeds` (batch, n, hidden), and
            where there is padding `attention_mask` (batch, n).
        prefix: `""`, or `"decoder_"` for an encoder-decoder's second axis.

    Returns:
        The tensors with this axis shifted, and the axis (None where it is not among them).

    Raises:
        InputError: A mask has another shape or holes, or a row has no token, or a token does not exist.
    """
    ids, embeds = tensors.get(f"{prefix}input_ids"), tensors.get(f"{prefix}inputs_embeds")
    main = ids if ids is not None else embeds
    if main is None:
        return dict(tensors), None
    named = f"{prefix}{'inputs_embeds' if ids is None else 'input_ids'}"
    # Ids may have an axis of codebooks behind that of the tokens.
    if main.dim() not in ((2, 3) if ids is not None else (3,)):
        needed = "(batch, tokens, features)" if ids is None else "(batch, tokens)"
        raise InputError(f"{named} has shape {tuple(main.shape)}, needs {needed}", "give a whole row for each text")
    size = (main.shape[0], main.shape[1])
    if 0 in size:
        raise InputError(f"{named} has shape {tuple(main.shape)}: no token", "give one token or more a row")
    starts, lengths = _runs(tensors.get(f"{prefix}attention_mask"), size, prefix)
    shifted = _shifted(tensors, prefix, starts, size)
    return shifted, _axis(loaded, named, None if main.dim() == 3 else shifted[named], lengths, size[1])


def example_count(tensors: Mapping[str, Tensor]) -> int:
    """How many examples inputs without tokens hold: packed ones come with the sizes of grids, or with lengths."""
    for name, tensor in tensors.items():
        if ("grid" in name and tensor.dim() == 2 and tensor.shape[1] == 3) or (
            name.endswith("_lens") and tensor.dim() == 1
        ):
            return len(tensor)
    return len(next(iter(tensors.values())))


def _runs(mask: Tensor | None, size: tuple[int, int], prefix: str) -> tuple[list[int], list[int]]:
    """First real token and number of real tokens of each row."""
    if mask is None:
        return [0] * size[0], [size[1]] * size[0]
    if tuple(mask.shape) != size:
        raise InputError(
            f"{prefix}attention_mask has shape {tuple(mask.shape)}, needs {size}", "give one as large as the token ids"
        )
    starts, lengths = [], []
    for i, row in enumerate(mask.bool().tolist()):
        real = [j for j, on in enumerate(row) if on]
        if not real:
            raise InputError(f"row {i} of {prefix}attention_mask leaves no token", "leave that row out")
        if real[-1] - real[0] + 1 != len(real):
            raise InputError(f"row {i} of {prefix}attention_mask has holes", "pad on one side only")
        starts.append(real[0])
        lengths.append(len(real))
    return starts, lengths


def _shifted(
    tensors: Mapping[str, Tensor], prefix: str, starts: Sequence[int], size: tuple[int, int]
) -> dict[str, Tensor]:
    result = dict(tensors)
    if not any(starts):
        return result
    for name, value in tensors.items():
        if name.startswith("decoder_") != bool(prefix):
            continue
        # Pictures and sounds may have as many channels as the text has tokens.
        by_token = value.dim() == 2 or name in (f"{prefix}inputs_embeds", f"{prefix}input_ids")
        if by_token and tuple(value.shape[:2]) == size:
            rows = [torch.roll(row, -start, dims=0) for row, start in zip(value, starts, strict=True)]
            result[name] = torch.stack(rows)
        elif name == f"{prefix}position_ids":
            raise InputError(
                f"{name} has shape {tuple(value.shape)}, needs {size} with padding on the left",
                "leave it out, or give one as large as the token ids",
            )
    return result


def _axis(loaded: LoadedModel, name: str, ids: Tensor | None, lengths: Sequence[int], width: int) -> TokenAxis:
    count = torch.tensor(lengths, dtype=torch.int64)
    if ids is None:
        labels = tuple(tuple(str(j) for j in range(n)) for n in lengths)
        words = tuple(tuple(range(n)) for n in lengths)
        return TokenAxis(None, count, torch.zeros(len(lengths), width, dtype=torch.bool), labels, words)
    ids = ids.detach().to("cpu", torch.int64)
    size = vocabulary_size(loaded.model)
    if int(ids.min()) < 0 or (size is not None and int(ids.max()) >= size):
        known = "no negative ones" if size is None else f"0 to {size - 1}"
        raise InputError(
            f"{name} holds {int(ids.min())} to {int(ids.max())}, {loaded.name} has {known}",
            "give token ids of this model's own tokenizer",
        )
    reader = None if loaded.tokenizer is None else TokenReader(loaded.tokenizer)
    rows = [describe_ids(loaded.model, reader, ids[i, :n].tolist()) for i, n in enumerate(lengths)]
    special = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        special[i, : len(row)] = torch.tensor(row.special)
    return TokenAxis(ids, count, special, tuple(r.labels for r in rows), tuple(r.words for r in rows))
