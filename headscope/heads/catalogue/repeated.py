"""Random tokens, written twice: whoever predicts the second copy has looked at the first.

Olsson et al. 2022, "In-context Learning and Induction Heads", section "Argument 4" and its appendix on head scores: no
bigram statistics help with random tokens, so what a model knows of the second copy it has from the context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from headscope.errors import InputError, ModelError
from headscope.models.limits import text_limit, vocabulary_size
from headscope.models.loading import LoadedModel
from headscope.models.signature import takes
from headscope.models.text_config import text_config
from headscope.models.text_inputs import nothing_made, read_texts
from headscope.models.tokens import TokenReader

SHORTEST = 8
_PLACEHOLDER = re.compile(r"[\[<(|{]*(un_?used|reserved|extra_id|madeupword|dummy)\S*", re.IGNORECASE)
_ROLE = re.compile(r"_token(_id|_ids|_index)$")


@dataclass(frozen=True)
class RepeatedTokens:
    """Sequences of random tokens, each repeated.

    Attributes:
        ids: Token ids, a list a sequence, all of one length: what begins it, the copies, what closes it.
        prefix: Tokens before the first copy: BOS or [CLS]; 0 where the model has none.
        length: Tokens of a copy, all different from each other.
        copies: How often they stand in a sequence.
        seed: Of the random ids.
    """

    ids: list[list[int]]
    prefix: int
    length: int
    copies: int
    seed: int

    def span(self, copy: int) -> range:
        """The positions of a copy's tokens in every sequence; the first copy is 0."""
        start = self.prefix + copy * self.length
        return range(start, start + self.length)


def repeated_ids(
    loaded: LoadedModel, *, sequences: int = 16, length: int = 50, copies: int = 2, seed: int = 0
) -> RepeatedTokens:
    """Random token ids, repeated; for the text that a model reads, an encoder-decoder's encoder.

    Drawn uniformly, without replacement within a copy, from the tokens that stand for text: none that is special, added
    to the vocabulary, unused, blank or a part of a character, or that only the tokenizer or only the model has. Without
    a tokenizer, from the whole vocabulary less the tokens that the configuration names. A sequence begins and ends as
    the tokenizer begins and ends a text; where it puts nothing in front but knows a beginning-of-sequence token, a
    decoder-only model gets that. It is put before the first copy and takes none of its tokens' places.

    Args:
        loaded: The model; it is not run.
        sequences: How many; the first of them are the same for every number.
        length: Tokens a copy, fewer where the model's limit or its vocabulary asks for it.
        copies: 2 or more.
        seed: Of a generator of their own.

    Raises:
        InputError: A number is too small.
        ModelError: The model reads no text, or `SHORTEST` tokens a copy (or `length`, if less) do not fit.
    """
    for name, value, least in (("sequences", sequences, 1), ("length", length, 2), ("copies", copies, 2)):
        if value < least:
            raise InputError(f"{name} is {value}, needs {least} or more", "give a larger number")
    if seed < 0:
        raise InputError(f"seed is {seed}, needs 0 or more", "give 0 or more")
    if not takes(loaded.model, "input_ids"):
        raise ModelError(
            f"{loaded.name} reads no text, so it cannot be given random tokens", "name other types with --types"
        )
    usable = usable_ids(loaded)
    before, after = _around(loaded, usable)
    most = _most(loaded, len(usable), len(before) + len(after), copies)
    if most < min(length, SHORTEST):
        raise ModelError(
            f"{loaded.name} has room for {max(most, 0)} different tokens {copies} times, needs {SHORTEST}",
            "name other types with --types, or take a model with more room",
        )
    length = min(length, most)
    drawn = [np.random.default_rng((seed, i)).choice(usable, length, replace=False).tolist() for i in range(sequences)]
    return RepeatedTokens([[*before, *one * copies, *after] for one in drawn], len(before), length, copies, seed)


def usable_ids(loaded: LoadedModel) -> NDArray[np.int64]:
    """The ids that stand for text and that both the model and its tokenizer have, ascending.

    Raises:
        ModelError: There is neither a tokenizer nor a vocabulary of known size.
    """
    size = vocabulary_size(loaded.model)
    named = _named_ids(loaded)
    if loaded.tokenizer is None:
        if size is None:
            raise ModelError(
                f"{loaded.name} has no tokenizer, and it cannot be told how many tokens it knows",
                "give --tokenizer, or name other types with --types",
            )
        return np.array([n for n in range(size) if n not in named], dtype=np.int64)
    reader = TokenReader(loaded.tokenizer)
    unknown = {loaded.tokenizer.unk_token_id}
    out = named | unknown | reader.special | reader.spelling.added.keys()
    ids = {n for n in loaded.tokenizer.get_vocab().values() if (size is None or n < size) and n not in out}
    found = sorted(ids)
    texts = [piece.text for piece in reader.pieces(found)]
    return np.array([n for n, text in zip(found, texts, strict=True) if _shows(text)], dtype=np.int64)


def _shows(text: str) -> bool:
    """Whether a token has something to read, and stands for text."""
    shown = any(c.isprintable() and not c.isspace() for c in text)
    return shown and _PLACEHOLDER.fullmatch(text.strip()) is None


def _named_ids(loaded: LoadedModel) -> set[int]:
    """The tokens that the configuration has a role for: BOS, padding, an image's place in the text."""
    configs = (loaded.model.config, text_config(loaded.model))
    values = [value for config in configs for name, value in vars(config).items() if _ROLE.search(name)]
    flat = [n for value in values for n in (value if isinstance(value, list | tuple) else [value])]
    return {n for n in flat if isinstance(n, int)}


def _around(loaded: LoadedModel, usable: NDArray[np.int64]) -> tuple[Sequence[int], Sequence[int]]:
    """The special tokens that begin and that close a text."""
    config, tokenizer = text_config(loaded.model), loaded.tokenizer
    before, after = ((), ()) if tokenizer is None else _template(loaded, tokenizer, usable)
    bos: Any = getattr(config if tokenizer is None else tokenizer, "bos_token_id", None)
    size = vocabulary_size(loaded.model)
    known = isinstance(bos, int) and bos >= 0 and (size is None or bos < size)
    if not before and known and not getattr(loaded.model.config, "is_encoder_decoder", False):
        before = (bos,)
    return before, after


def _template(
    loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, usable: NDArray[np.int64]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer itself puts around a text."""
    text = " ".join(piece.text.strip() for piece in TokenReader(tokenizer).pieces(usable[:SHORTEST].tolist())) or "a"
    reader, (read,) = read_texts(loaded, [text])
    if not read.made:
        raise nothing_made(loaded.name, reader, text)
    ids, own = read.sequence.ids, [i for i, special in enumerate(read.sequence.special) if not special]
    if not own:
        return (), ()
    return ids[: own[0]], ids[own[-1] + 1 :]


def _most(loaded: LoadedModel, usable: int, around: int, copies: int) -> int:
    """How many different tokens fit into a copy."""
    limit = text_limit(loaded.model, loaded.tokenizer)
    return usable if limit is None else min(usable, (limit - around) // copies)
