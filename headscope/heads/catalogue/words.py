"""Sentences given as words, as batches in which every token knows its word: syntax and coreference are about words.

Words are found again in the text that a tokenizer reads, by the character offsets that a fast tokenizer gives with its
tokens. Without offsets the text is tokenized up to the end of each word, which counts the tokens of the words so far;
that is only used where the tokens of each beginning are the beginning of the whole text's tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headscope.errors import InputError, ModelError
from headscope.heads.catalogue.probing import Probing
from headscope.models.batches import Batch, TokenAxis, TokenSequence
from headscope.models.checkpoint import first_line
from headscope.models.decoder_inputs import has_decoder
from headscope.models.encoding import TOKENIZER_HINT
from headscope.models.inputs import from_sequences
from headscope.models.limits import decoder_limit, text_limit
from headscope.models.quiet import quiet
from headscope.models.text_inputs import judge_unknown, read_texts


@dataclass(frozen=True)
class WordBatches:
    """Sentences whose words are known token by token.

    Attributes:
        batches: In each axis' `words` every token has the number of its word in the sentence, -1 where it belongs to
            none (special tokens). `order` counts the sentences that were kept. Encoder-decoders read a sentence with
            both of their stacks.
        kept: Which of the given sentences these are, ascending.
        words: Their words.
        notes: What was left out, one line each.
    """

    batches: tuple[Batch, ...]
    kept: tuple[int, ...]
    words: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Line:
    """One sentence as text, with the place of each word in it: characters from `starts` up to `ends`."""

    text: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class _Aligned:
    """Each token's word, -1 for none, and how many tokens reach into a second word."""

    words: tuple[int, ...]
    across: int


def word_batches(
    probing: Probing, sentences: Sequence[Sequence[str]], spaces: Sequence[Sequence[bool]] | None = None
) -> WordBatches:
    """Tokenize sentences for the model and find out which word each token belongs to.

    A token that reaches into a second word belongs to the first of them; one that is a space only, to the word after
    it. Sentences with a word that has no token of its own, or with more tokens than the model takes, are left out.

    Args:
        probing: The model, its tokenizer and the batch size.
        sentences: Words and punctuation marks.
        spaces: Whether a space follows each word; after all of them where not given.

    Raises:
        InputError: A sentence has no words or an empty one, or no sentence is left.
        ModelError: The tokenizer is missing, fails, or does not fit the model.
    """
    lines = [_line(i, words, None if spaces is None else spaces[i]) for i, words in enumerate(sentences)]
    if not lines:
        raise InputError("there are no sentences to read", "give at least one sentence")
    reader, read = read_texts(probing.loaded, [line.text for line in lines])
    sequences = [one.sequence for one in read]
    notes = judge_unknown(probing.loaded.name, reader, read)
    aligned = _aligned(probing, lines, sequences)
    kept, more = _kept(probing, lines, sequences, aligned)
    notes += more
    across = sum(one.across for i in kept if (one := aligned[i]) is not None)
    if across:
        notes.append(f"{_several(across, 'token')} across two words counted to the first of them")
    if not kept:
        raise InputError(
            "no sentence can be read word by word: " + "; ".join(notes),
            "give another --tokenizer, or sentences that fit the model",
        )
    chosen = [replace(sequences[i], words=one.words) for i in kept if (one := aligned[i]) is not None]
    batches, more = _batches(probing, chosen, [lines[i].text for i in kept])
    return WordBatches(batches, tuple(kept), tuple(tuple(sentences[i]) for i in kept), (*notes, *more))


def _line(number: int, words: Sequence[str], spaces: Sequence[bool] | None) -> _Line:
    if not words or any(not word.strip() for word in words):
        raise InputError(
            f"sentence {number} has {'an empty word' if words else 'no words'}",
            "give each sentence words that are not empty",
        )
    if spaces is not None and len(spaces) != len(words):
        raise InputError(
            f"sentence {number} has {len(words)} words and {len(spaces)} signs of spaces", "give one for each word"
        )
    text, starts, ends = "", [], []
    for i, word in enumerate(words):
        starts.append(len(text))
        text += word
        ends.append(len(text))
        text += " " if i + 1 < len(words) and (spaces is None or spaces[i]) else ""
    return _Line(text, tuple(starts), tuple(ends))


# ------------------------------------------------------------------ which word a token belongs to
def _aligned(probing: Probing, lines: Sequence[_Line], sequences: Sequence[TokenSequence]) -> list[_Aligned | None]:
    """One a sentence; None where tokens and words do not fit together."""
    tokenizer: Any = probing.loaded.tokenizer
    try:
        with quiet():
            if not tokenizer.is_fast:
                return [_by_beginnings(tokenizer, *pair) for pair in zip(lines, sequences, strict=True)]
            encoded = tokenizer([line.text for line in lines], return_offsets_mapping=True)
    except Exception as error:  # a tokenizer fails in the class of whatever it is made of
        message = f"the tokenizer of {probing.loaded.name} cannot say where its tokens are: {first_line(error)}"
        raise ModelError(message, TOKENIZER_HINT) from error
    result: list[_Aligned | None] = []
    for line, sequence, ids, offsets in zip(
        lines, sequences, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        result.append(_by_offsets(line, sequence, offsets) if tuple(ids) == sequence.ids else None)
    return result


def _by_offsets(line: _Line, sequence: TokenSequence, offsets: Sequence[tuple[int, int]]) -> _Aligned | None:
    words, across = [], 0
    for (start, end), special in zip(offsets, sequence.special, strict=True):
        # Some tokenizers count the space before a word to the word's first token.
        inside = line.text[start:end]
        start += len(inside) - len(inside.lstrip())
        end = max(end - (len(inside) - len(inside.rstrip())), start)
        word = bisect_right(line.ends, start)
        words.append(-1 if special or word == len(line.ends) else word)
        across += not special and word + 1 < len(line.ends) and end > line.starts[word + 1]
    real = [word for word in words if word >= 0]
    return _Aligned(tuple(words), across) if real == sorted(real) else None


def _by_beginnings(tokenizer: Any, line: _Line, sequence: TokenSequence) -> _Aligned | None:
    body = [n for n, special in zip(sequence.ids, sequence.special, strict=True) if not special]
    counts: list[int] = []
    for end in line.ends:
        beginning = tokenizer(line.text[:end], add_special_tokens=False)["input_ids"]
        if beginning != body[: len(beginning)]:
            return None
        counts.append(len(beginning))
    if counts[-1] != len(body):
        return None
    numbers = iter(range(len(body)))
    return _Aligned(tuple(-1 if special else bisect_right(counts, next(numbers)) for special in sequence.special), 0)


def _kept(
    probing: Probing, lines: Sequence[_Line], sequences: Sequence[TokenSequence], aligned: Sequence[_Aligned | None]
) -> tuple[list[int], list[str]]:
    """The sentences that can be used, and why the others cannot."""
    limit = _limit(probing)
    reasons: dict[str, int] = {}
    kept = []
    for i, (line, sequence, one) in enumerate(zip(lines, sequences, aligned, strict=True)):
        if limit is not None and len(sequence) > limit:
            reason = f"more than {limit} tokens"
        elif one is None:
            reason = "tokens that do not fit its words"
        elif set(range(len(line.ends))) - set(one.words):
            reason = "a word without a token of its own"
        else:
            kept.append(i)
            continue
        reasons[reason] = reasons.get(reason, 0) + 1
    return kept, [f"{_several(n, 'sentence')} left out: {reason}" for reason, n in reasons.items()]


def _limit(probing: Probing) -> int | None:
    loaded = probing.loaded
    # A decoder reads its start token before the sentence.
    decoder = decoder_limit(loaded.model) if has_decoder(loaded) else None
    limits = [n for n in (text_limit(loaded.model, loaded.tokenizer), decoder and decoder - 1) if n is not None]
    return min(limits, default=None)


# ------------------------------------------------------------------ batches
def _batches(
    probing: Probing, sequences: Sequence[TokenSequence], texts: Sequence[str]
) -> tuple[tuple[Batch, ...], list[str]]:
    loaded = probing.loaded
    decoded = has_decoder(loaded)
    prepared = from_sequences(loaded, sequences, texts if decoded else None, batch_size=probing.batch_size)
    if not decoded:
        return prepared.batches, []
    axes = [_decoder_axis(batch, sequences) for batch in prepared.batches]
    if all(axis is not None for axis in axes):
        pairs = zip(prepared.batches, axes, strict=True)
        return tuple(replace(b, axes={**b.axes, "decoder": a}) for b, a in pairs if a is not None), []
    plain = (replace(b, axes={"text": b.axes["text"]}) for b in prepared.batches)
    return tuple(plain), ["the decoder is left out: it reads other tokens than the encoder"]


def _decoder_axis(batch: Batch, sequences: Sequence[TokenSequence]) -> TokenAxis | None:
    """The decoder's tokens with the words of the encoder's, None where the tokens are others."""
    axis = batch.axes["decoder"]
    assert axis.ids is not None
    words = []
    for row, i in enumerate(batch.order):
        size = int(axis.lengths[row])
        special = axis.special[row, :size].tolist()
        known = list(_real(sequences[i].ids, sequences[i].words, sequences[i].special))
        if [n for n, _ in known] != [
            n for n, own in zip(axis.ids[row, :size].tolist(), special, strict=True) if not own
        ]:
            return None
        numbers = iter(word for _, word in known)
        words.append(tuple(-1 if own else next(numbers) for own in special))
    return replace(axis, words=tuple(words))


def _real(ids: Sequence[int], words: Sequence[int], special: Sequence[bool]) -> Iterator[tuple[int, int]]:
    return ((n, word) for n, word, own in zip(ids, words, special, strict=True) if not own)


def _several(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
