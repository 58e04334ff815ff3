"""What an encoder-decoder's decoder reads: a given text, or one that the model generates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headscope.errors import InputError
from headscope.models.batches import TokenAxis, TokenSequence, axis_of, mask_of
from headscope.models.generating import greedy
from headscope.models.limits import decoder_limit
from headscope.models.loading import LoadedModel
from headscope.models.signature import takes
from headscope.models.text_config import text_config
from headscope.models.text_inputs import describe_ids, shorten, text_sequences
from headscope.models.tokens import TokenReader

NEW_TOKENS = 20
HINT = "give the decoder's text with --decoder-text"


def has_decoder(loaded: LoadedModel) -> bool:
    """Whether the model reads a second text, with a decoder."""
    return bool(loaded.model.config.is_encoder_decoder) and takes(loaded.model, "decoder_input_ids")


def given_decoder(loaded: LoadedModel, texts: Sequence[str]) -> tuple[list[TokenSequence], list[str]]:
    """The decoder's tokens for given texts: the start token, then the text without its end token.

    Returns:
        A sequence a text, cut to the decoder's limit, and warnings.
    """
    targets, warnings = text_sequences(loaded, texts, target=True)
    start, ends = start_token(loaded), _ends(loaded)
    reader = None if loaded.tokenizer is None else TokenReader(loaded.tokenizer)
    sequences = []
    for target in targets:
        ids = list(target.ids[:-1] if len(target) > 1 and target.ids[-1] in ends else target.ids)
        ids = ids if ids[0] == start else [start, *ids]
        sequences.append(describe_ids(loaded.model, reader, ids, start=True))
    short = [shorten(s, decoder_limit(loaded.model)) for s in sequences]
    cut = sum(len(a) < len(b) for a, b in zip(short, sequences, strict=True))
    return short, warnings + ([f"{cut} decoder texts cut to {decoder_limit(loaded.model)} tokens"] if cut else [])


def generated_decoder(
    loaded: LoadedModel, inputs: dict[str, Tensor], most: int | None = None
) -> tuple[list[TokenSequence], list[str]]:
    """Generate the decoder's tokens greedily.

    Args:
        most: How many, without the start token; None is `NEW_TOKENS`.

    Returns:
        A sequence an example of the batch (the start token first), and their texts.

    Raises:
        InputError: The model cannot generate, or its output head is newly initialised.
    """
    limit = decoder_limit(loaded.model)
    new = most or NEW_TOKENS
    new = new if limit is None else max(1, min(new, limit - 8))
    rows = greedy(
        loaded,
        inputs,
        new,
        "generate what its decoder reads",
        HINT,
        decoder_start_token_id=start_token(loaded),
        min_new_tokens=1,
    )
    return _generated(loaded, rows)


def _generated(loaded: LoadedModel, rows: list[list[int]]) -> tuple[list[TokenSequence], list[str]]:
    start, ends = start_token(loaded), _ends(loaded)
    reader = None if loaded.tokenizer is None else TokenReader(loaded.tokenizer)
    sequences, texts = [], []
    for row in rows:
        ids = row if row and row[0] == start else [start, *row]
        stop = next((i for i, n in enumerate(ids) if i > 0 and n in ends), len(ids))
        sequence = describe_ids(loaded.model, reader, ids[:stop], start=True)
        sequences.append(sequence)
        texts.append(_text(loaded, sequence))
    return sequences, texts


def _text(loaded: LoadedModel, sequence: TokenSequence) -> str:
    """The text of decoder tokens without special ones; the numbers, where there is no tokenizer."""
    plain = [n for n, special in zip(sequence.ids, sequence.special, strict=True) if not special]
    if loaded.tokenizer is None:
        return " ".join(map(str, plain))
    return str(loaded.tokenizer.decode(plain)).strip()


def decoder_inputs(
    loaded: LoadedModel, sequences: Sequence[TokenSequence], padding: int
) -> tuple[dict[str, Tensor], TokenAxis]:
    """The forward's decoder arguments for one batch, and the axis."""
    axis = axis_of(sequences, padding)
    assert axis.ids is not None
    inputs = {"decoder_input_ids": axis.ids}
    if takes(loaded.model, "decoder_attention_mask"):
        inputs["decoder_attention_mask"] = mask_of(axis)
    return inputs, axis


def start_token(loaded: LoadedModel) -> int:
    """The token that the decoder begins with.

    Raises:
        InputError: The configuration names none.
    """
    config, generation = loaded.model.config, getattr(loaded.model, "generation_config", None)
    for role in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        for place in (config, generation, text_config(loaded.model, decoder=True)):
            number = getattr(place, role, None)
            if isinstance(number, int):
                return number
    raise InputError(
        f"{loaded.name} does not say which token its decoder starts with",
        "set decoder_start_token_id in its config.json",
    )


def _ends(loaded: LoadedModel) -> set[int]:
    config, tokenizer = text_config(loaded.model, decoder=True), loaded.tokenizer
    eos, own = getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)
    ends = set(eos) if isinstance(eos, list) else {eos}
    return {n for n in ends | {own} | {getattr(config, "pad_token_id", None)} if n is not None}
