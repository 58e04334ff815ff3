"""The user's texts: cut into pieces that a model takes whole, and dealt out so that what judges has chosen nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from headscope.errors import InputError, ModelError
from headscope.importance.examples import Examples, Label
from headscope.importance.loss import Loss, kind_of, loss_of
from headscope.models.batches import Batch
from headscope.models.input_kinds import check_kinds
from headscope.models.inputs import prepare
from headscope.models.limits import text_limit, vocabulary_size
from headscope.models.loading import LoadedModel
from headscope.models.quiet import quiet

# Tokens of a piece, special ones included, where the model takes as many.
LENGTH = 256
# Shorter texts and remainders say little.
_LEAST = 8
# Tokens of a batch, and predictions for them: a few hundred megabytes.
_BATCH_TOKENS, _BATCH_LOGITS = 2048, 1 << 26
# With fewer texts than this for each role, pieces of one text may serve several roles.
_TEXTS_EACH = 8


@dataclass(frozen=True)
class Piece:
    """A text that the model takes whole.

    Attributes:
        text: What it says.
        label: Its label, as the user wrote it; None for none.
        source: The number of the user's text that it was cut from.
        tokens: How many tokens the model reads, special ones included.
    """

    text: str
    label: Label | None
    source: int
    tokens: int


@dataclass(frozen=True)
class Share:
    """What a role gets of the texts.

    Attributes:
        weight: Relative to the other roles.
        most: Tokens at most; None for no limit.
    """

    weight: float
    most: int | None = None


@dataclass(frozen=True)
class Data:
    """Batches and the loss on them.

    Attributes:
        batches: Orders count from 0.
        loss: What fits the model; where it is a distance, `Loss.remember` is still to be called.
        texts, tokens: How many.
    """

    batches: tuple[Batch, ...]
    loss: Loss
    texts: int
    tokens: int


def cut(loaded: LoadedModel, examples: Examples, length: int | None = None) -> tuple[Piece, ...]:
    """Texts as pieces of at most `length` tokens, cut between tokens; whole where a label or a decoder needs all of it.

    Args:
        length: Tokens a piece, special ones included; None takes `LENGTH`, or the model's limit if that is less.

    Raises:
        InputError: No piece is left that has `_LEAST` tokens.
        ModelError: The model does not read text alone, or has no tokenizer.
    """
    try:
        check_kinds(loaded, examples.texts, None, None, None, None, None)
    except InputError as error:
        raise ModelError(error.message, "score its heads by magnitude or random, which need no texts") from None
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.name} has no tokenizer that loads", "name another one with --tokenizer")
    limit = text_limit(loaded.model, loaded.tokenizer)
    most = min(length or LENGTH, limit or length or LENGTH)
    whole = kind_of(loaded.model) == "classifier" or bool(getattr(loaded.model.config, "is_encoder_decoder", False))
    tokenizer: Any = loaded.tokenizer
    pieces: list[Piece] = []
    # Tokenizers warn of what is longer than a model takes; it is cut here.
    with quiet():
        for source, (text, label) in enumerate(zip(examples.texts, examples.labels, strict=True)):
            if whole or not getattr(tokenizer, "is_fast", False):
                count = len(tokenizer(text, truncation=False)["input_ids"])
                pieces.append(Piece(text, label, source, min(count, most)))
                continue
            special = tokenizer.num_special_tokens_to_add(pair=False)
            if most < _LEAST + special:
                raise InputError(
                    f"pieces of {most} tokens are too short to score anything on",
                    f"give --max-length {_LEAST + special} or more",
                )
            pieces += (Piece(part, label, source, n + special) for part, n in _parts(tokenizer, text, most - special))
    if not pieces:
        raise InputError(f"no text has {_LEAST} tokens", "give longer texts")
    return tuple(pieces)


def _parts(tokenizer: Any, text: str, size: int) -> Iterator[tuple[str, int]]:
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False)["offset_mapping"]
    for start in range(0, len(offsets), size):
        part = offsets[start : start + size]
        words = text[part[0][0] : part[-1][1]]
        if len(part) >= _LEAST and words.strip():
            yield words, len(part)


def deal(pieces: Sequence[Piece], shares: Mapping[str, Share], seed: int = 0) -> dict[str, tuple[Piece, ...]]:
    """Deal pieces out to roles, by chance and without overlap; all pieces of a text to the same role if texts suffice.

    A role that is full is passed over, and takes no more than an eighth of what it may take from one text; what nobody
    takes is left, and so is what says the same as a piece of another role.

    Raises:
        InputError: There are fewer different pieces than roles.
    """
    sources = dict.fromkeys(p.source for p in pieces)
    by_text = len(sources) >= _TEXTS_EACH * len(shares)
    groups: dict[int, list[Piece]] = {}
    for number, piece in enumerate(pieces):
        groups.setdefault(piece.source if by_text else number, []).append(piece)
    if len(groups) < len(shares):
        raise _too_few(groups.values(), shares)
    random = np.random.default_rng(seed)
    dealt: dict[str, list[Piece]] = {role: [] for role in shares}
    tokens = dict.fromkeys(shares, 0)
    owners: dict[str, str] = {}
    for group in (list(groups.values())[i] for i in random.permutation(len(groups))):
        open_ = [r for r in shares if not _full(shares[r], tokens[r])]
        if not open_:
            break
        role = min(open_, key=lambda r: tokens[r] / shares[r].weight)
        for piece in _some(group, shares[role], tokens[role], random):
            if owners.setdefault(piece.text, role) == role:
                dealt[role].append(piece)
                tokens[role] += piece.tokens
    if not all(dealt.values()):
        raise _too_few(groups.values(), shares)
    return {role: tuple(found) for role, found in dealt.items()}


def _too_few(groups: Iterable[Sequence[Piece]], roles: Iterable[str]) -> InputError:
    different = len({piece.text for group in groups for piece in group})
    return InputError(
        f"{different} different piece{'s' * (different != 1)} of text cannot serve for {', '.join(roles)}",
        "give more text, so that nothing is chosen on the text that judges it",
    )


def _full(share: Share, tokens: int) -> bool:
    return share.most is not None and tokens >= share.most


def _some(group: Sequence[Piece], share: Share, tokens: int, random: np.random.Generator) -> Iterator[Piece]:
    """Pieces of a text, drawn by chance until the role is full or has enough of this text: it should hear of others."""
    if share.most is None:
        yield from group
        return
    left = min(share.most - tokens, max(1, share.most // _TEXTS_EACH))
    for i in random.permutation(len(group)):
        if left <= 0:
            return
        left -= group[i].tokens
        yield group[i]


def ready(
    loaded: LoadedModel,
    pieces: Sequence[Piece],
    labels: Sequence[int] = (),
    *,
    length: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Data:
    """Pieces as batches, and the loss on them.

    Args:
        labels: A classifier's, by piece.
        length: As for `cut`.
        batch_size: Texts a batch; None takes as many as fit in little memory.
    """
    texts = [p.text for p in pieces]
    decoder = texts if getattr(loaded.model.config, "is_encoder_decoder", False) else None
    limit = text_limit(loaded.model, loaded.tokenizer)
    most = min(length or LENGTH, limit or length or LENGTH)
    size = batch_size or _batch_size(loaded, max((p.tokens for p in pieces), default=1))
    prepared = prepare(loaded, texts=texts, decoder_texts=decoder, max_length=most, batch_size=size)
    return Data(prepared.batches, loss_of(loaded, labels, seed), prepared.texts, prepared.tokens)


def _batch_size(loaded: LoadedModel, longest: int) -> int:
    """Texts whose activations and predictions fit in little memory."""
    tokens = min(_BATCH_TOKENS, _BATCH_LOGITS // (vocabulary_size(loaded.model) or 1))
    return max(1, tokens // longest)


def label_numbers(model: PreTrainedModel, labels: Sequence[Label | None]) -> list[int]:
    """The numbers of a classifier's labels, given by name or number; empty for all other models.

    Raises:
        InputError: A text has no label, or one that the model does not know.
        ModelError: The model does not choose one of several labels.
    """
    if kind_of(model) != "classifier":
        return []
    config: Any = model.config
    if config.num_labels < 2 or getattr(config, "problem_type", None) in ("regression", "multi_label_classification"):
        raise ModelError(f"{type(model).__name__} here does not choose one of several labels", "leave the texts out")
    return [_label_number(config, i, given) for i, given in enumerate(labels)]


def _label_number(config: Any, index: int, given: Label | None) -> int:
    known = dict(config.label2id or {})
    if given is None:
        raise InputError(
            f"text {index} has no label, which a classifier needs",
            'write lines such as {"text": "…", "label": 0} to a .jsonl file',
        )
    number = given if isinstance(given, int) else known.get(given)
    if number is None or not 0 <= number < config.num_labels:
        raise InputError(
            f"text {index} has the label {given!r}, which the model does not know",
            f"its labels: {', '.join(list(known)[:10])}; or 0-{config.num_labels - 1}",
        )
    return number
