"""Texts and token numbers, turned into token sequences that the model can take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from headscope.errors import HeadscopeError, InputError, ModelError
from headscope.models.batches import TokenSequence
from headscope.models.encoding import TOKENIZER_HINT, Encoded, encode_texts
from headscope.models.limits import vocabulary_size
from headscope.models.loading import LoadedModel
from headscope.models.text_config import text_config
from headscope.models.text_form import PLAIN, TextForm
from headscope.models.tokens import SPECIAL_ROLES, TokenReader


def text_sequences(
    loaded: LoadedModel, texts: Sequence[str], *, target: bool = False, form: TextForm = PLAIN, open_end: bool = False
) -> tuple[list[TokenSequence], list[str]]:
    """Tokenize, with the tokenizer's own special tokens as transformers adds them.

    Args:
        loaded: The model and its tokenizer.
        texts: One text or more.
        target: Tokenize as an encoder-decoder's target.
        form: Pairs, a chat template around, or words already split.
        open_end: Leave out what the tokenizer closes a text with: it is to be continued.

    Returns:
        A sequence a text, not cut to any length, and warnings.

    Raises:
        InputError: A text is empty or not valid Unicode, or the tokenizer cannot read texts in this form.
        ModelError: There is no tokenizer, or it does not know a single token of the texts, or has tokens that the
            model does not.
    """
    check_texts(texts)
    check_texts(form.pairs or ())
    reader, read = read_texts(loaded, texts, target=target, form=form, open_end=open_end)
    for text, one in zip(texts, read, strict=True):
        if not one.made:
            raise nothing_made(loaded.name, reader, text)
    return [one.sequence for one in read], judge_unknown(loaded.name, reader, read)


@dataclass(frozen=True)
class ReadText:
    """A text's tokens, or those that are kept of them.

    Attributes:
        length: How many there are, kept or not.
        made: How many of all are no template.
        words, unknown: How many of those kept stand for words (no special, no blank), and are unknown.
    """

    sequence: TokenSequence
    length: int
    made: int
    words: int
    unknown: int

    @property
    def mostly_unknown(self) -> bool:
        """Whether the tokenizer knows less than half of the words."""
        return self.words > 0 and 2 * self.unknown >= self.words


def read_texts(
    loaded: LoadedModel,
    texts: Sequence[str],
    *,
    target: bool = False,
    limit: int | None = None,
    form: TextForm = PLAIN,
    open_end: bool = False,
) -> tuple[TokenReader, list[ReadText]]:
    """Tokenize valid texts; how much of each the tokenizer knows is for the caller to judge.

    Args:
        limit: Tokens kept of each, as `shorten` cuts; labels of millions that go anyway take long.

    Raises:
        ModelError: There is no tokenizer, or it fails, or it has tokens that the model does not.
    """
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.name} has no tokenizer that loads", TOKENIZER_HINT)
    reader = TokenReader(loaded.tokenizer)
    encoded = encode_texts(loaded, reader, texts, form, target=target)
    sources = [text + " ".join(form.pairs or ()) for text in texts]
    read = [
        _read(reader, source, one.opened() if open_end else one, limit)
        for source, one in zip(sources, encoded, strict=True)
    ]
    size = vocabulary_size(loaded.model)
    largest = max((max(one.sequence.ids, default=0) for one in read), default=0)
    if size is not None and largest >= size:
        message = f"the tokenizer does not fit {loaded.name}: it gives token {largest}, the model has {size} tokens"
        raise ModelError(message, TOKENIZER_HINT)
    return reader, read


def check_texts(texts: Sequence[str]) -> None:
    """Refuse empty texts and such as are no valid Unicode.

    Raises:
        InputError: Names the text by its number, from 0.
    """
    for i, text in enumerate(texts):
        which = f"text {i}" if len(texts) > 1 else "the text"
        if not isinstance(text, str):
            raise InputError(f"{which} is a {type(text).__name__}, not a string", "give texts")
        if not text.strip():
            raise InputError(f"{which} is empty", "give at least one word")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{which} is not valid Unicode at character {error.start}", "save it as UTF-8") from error


def id_sequences(loaded: LoadedModel, ids: Sequence[Sequence[int]]) -> list[TokenSequence]:
    """Token numbers as they are; no tokenizer is needed.

    Raises:
        InputError: A list is empty, or a number is negative or has no embedding.
    """
    size = vocabulary_size(loaded.model)
    for i, row in enumerate(ids):
        if not len(row):
            which = f"list {i} of token ids" if len(ids) > 1 else "the list of token ids"
            raise InputError(f"{which} is empty", 'for example --ids "101 7592 102"')
        for number in row:
            if number < 0 or (size is not None and number >= size):
                valid = "not negative" if size is None else f"0 to {size - 1}"
                raise InputError(f"token id {number} does not exist in {loaded.name}", f"valid ids are {valid}")
    reader = None if loaded.tokenizer is None else TokenReader(loaded.tokenizer)
    return [describe_ids(loaded.model, reader, [int(n) for n in row]) for row in ids]


def describe_ids(
    model: PreTrainedModel, reader: TokenReader | None, ids: Sequence[int], *, start: bool = False
) -> TokenSequence:
    """Labels, words and special tokens of token numbers.

    Without a tokenizer labels are the numbers themselves, and special are those that the model's configuration names.
    With `start` the first token is a decoder's start, special whatever else it stands for.
    """
    if reader is None:
        config = text_config(model)
        named = [getattr(config, f"{role}_token_id", None) for role in (*SPECIAL_ROLES, "decoder_start")]
        # Several end tokens are a list.
        known = {n for one in named for n in (one if isinstance(one, list | tuple) else [one])}
        special = tuple(n in known or (start and i == 0) for i, n in enumerate(ids))
        return TokenSequence(tuple(ids), special, tuple(str(n) for n in ids), tuple(range(len(ids))))
    special = tuple(n in reader.special or (start and i == 0) for i, n in enumerate(ids))
    return TokenSequence(tuple(ids), special, *reader.read(ids, special))


def shorten(sequence: TokenSequence, limit: int | None, *, from_left: bool = False) -> TokenSequence:
    """Cut the text out of a sequence that is too long, keeping what is around it; of a pair, the longer text first.

    Raises:
        InputError: `limit` leaves no room between the special tokens.
    """
    if limit is None or len(sequence) <= limit:
        return sequence
    return sequence.take(_kept(sequence.special, sequence.parts, limit, from_left))


def _kept(specials: Sequence[bool], parts: Sequence[int] | None, limit: int, from_left: bool) -> list[int]:
    if parts is not None:
        return _kept_of_parts(parts, limit, from_left)
    head = next((i for i, special in enumerate(specials) if not special), 0)
    tail = next((i for i, special in enumerate(reversed(specials)) if not special), 0)
    room = limit - head - tail
    if room < 1:
        raise _no_room(limit, head + tail, 1)
    body = range(head, len(specials) - tail)
    kept = body[-room:] if from_left else body[:room]
    return [*range(head), *kept, *range(len(specials) - tail, len(specials))]


def _kept_of_parts(parts: Sequence[int], limit: int, from_left: bool) -> list[int]:
    texts = [[i for i, part in enumerate(parts) if part == number] for number in sorted({*parts} - {-1})]
    around = [i for i, part in enumerate(parts) if part < 0]
    room = limit - len(around)
    if room < len(texts):
        raise _no_room(limit, len(around), len(texts))
    kept = around
    for own, share in zip(texts, _shares([len(own) for own in texts], room), strict=True):
        kept = kept + (own[-share:] if from_left else own[:share])
    return sorted(kept)


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """How much of one or two texts is kept; of two the longer is cut, then both to a half each (the odd token is the
    longer one's, or the second's), as tokenizers do by `longest_first`."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    short, long = sorted(lengths)
    short = min(short, room // 2)
    long = min(long, room - short)
    return [long, short] if lengths[0] > lengths[1] else [short, long]


def _no_room(limit: int, around: int, needed: int) -> InputError:
    message = f"max_length {limit} leaves no room for text beside {around} tokens around it"
    return InputError(message, f"--max-length {around + needed} or more")


def _read(reader: TokenReader, text: str, one: Encoded, limit: int | None) -> ReadText:
    length, made = len(one.ids), len(one.ids) - sum(one.template)
    special = [t or n in reader.special for t, n in zip(one.template, one.ids, strict=True)]
    if limit is not None and length > limit:
        from_left = getattr(reader.tokenizer, "truncation_side", "right") == "left"
        kept = _kept(special, one.parts, limit, from_left)
        one, special = one.take(kept), [special[k] for k in kept]
    labels, words = reader.read(one.ids, special, one.word_ids)
    words = _given_words(one, special) if one.given_words else words
    sequence = TokenSequence(one.ids, tuple(special), labels, words, one.type_ids, one.parts)
    unk, literal = reader.tokenizer.unk_token_id, str(reader.tokenizer.unk_token) in text
    unknown = [n == unk and not added and not literal for n, added in zip(one.ids, one.template, strict=True)]
    counted = sum(
        bad or not (own or not label.strip("␣")) for bad, own, label in zip(unknown, special, labels, strict=True)
    )
    return ReadText(sequence, length, made, counted, sum(unknown))


def _given_words(one: Encoded, special: Sequence[bool]) -> tuple[int, ...]:
    """The number of the given word that each token belongs to, from 0 upward; special tokens are words of their own."""
    assert one.word_ids is not None
    numbers: list[int] = []
    for i, word in enumerate(one.word_ids):
        joined = i > 0 and not special[i] and not special[i - 1] and word == one.word_ids[i - 1]
        numbers.append((numbers[-1] if numbers else -1) + (not joined))
    return tuple(numbers)


def nothing_made(name: str, reader: TokenReader, text: str) -> HeadscopeError:
    """What to say of a text of which the tokenizer makes no token."""
    if len(reader.tokenizer) <= len(reader.spelling.added) + 1:
        return ModelError(f"the tokenizer of {name} has no vocabulary", TOKENIZER_HINT)
    return InputError(f"the tokenizer of {name} finds nothing to read in {text[:40]!r}", "give at least one word")


def judge_unknown(name: str, reader: TokenReader, read: Sequence[ReadText]) -> list[str]:
    """A warning where a tokenizer knows too little; transformers silently makes an empty one of a directory without a
    vocabulary, and then every word is unknown.

    Raises:
        ModelError: It knows nothing of any of the texts.
    """
    if any(one.words for one in read) and all(one.unknown == one.words for one in read):
        message = f"the tokenizer of {name} knows none of the text: every token is {reader.tokenizer.unk_token}"
        raise ModelError(message, TOKENIZER_HINT)
    bad = [i for i, one in enumerate(read) if one.mostly_unknown]
    if not bad:
        return []
    first = read[bad[0]]
    which = "the text" if len(read) == 1 else f"text {bad[0]}"
    more = f", and half or more of {len(bad) - 1} other texts" if len(bad) > 1 else ""
    unk = reader.tokenizer.unk_token
    return [
        f"the tokenizer does not know {first.unknown} of the {first.words} tokens of {which} ({unk}){more}: "
        "what is measured there says little"
    ]
