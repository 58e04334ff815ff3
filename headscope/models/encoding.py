"""Texts in any form, through the tokenizer: plain, in pairs, in a chat template, or split into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headscope.errors import InputError, ModelError
from headscope.models.checkpoint import first_line
from headscope.models.loading import LoadedModel
from headscope.models.quiet import quiet
from headscope.models.text_form import TextForm
from headscope.models.tokens import TokenReader

TOKENIZER_HINT = "name another one with --tokenizer, or give token ids with --ids"
# Stands in for a message, to find what its template puts around it; no text has it.
_PLACE = "\ue000"


@dataclass(frozen=True)
class Encoded:
    """What a tokenizer made of one text: lists of the same length, or None.

    Attributes:
        template: Whether a token was put around the text, not read from it.
        type_ids: Segment numbers, where the tokenizer gives them.
        word_ids: The tokenizer's own word numbers, or those of the given words; None where no word is.
        given_words: Whether `word_ids` are those of words that were given split.
        parts: 0 at a token of the text, 1 of its pair, -1 at what is put around them; None for a plain text.
    """

    ids: tuple[int, ...]
    template: tuple[bool, ...]
    type_ids: tuple[int, ...] | None = None
    word_ids: tuple[int | None, ...] | None = None
    given_words: bool = False
    parts: tuple[int, ...] | None = None

    def take(self, positions: Sequence[int]) -> Encoded:
        """The tokens at these positions."""
        return replace(
            self,
            ids=tuple(self.ids[i] for i in positions),
            template=tuple(self.template[i] for i in positions),
            type_ids=None if self.type_ids is None else tuple(self.type_ids[i] for i in positions),
            word_ids=None if self.word_ids is None else tuple(self.word_ids[i] for i in positions),
            parts=None if self.parts is None else tuple(self.parts[i] for i in positions),
        )

    def opened(self) -> Encoded:
        """Without the tokens that close the text: it is to be continued."""
        end = len(self.ids)
        while end > 1 and self.template[end - 1]:
            end -= 1
        return self.take(range(end))


def encode_texts(
    loaded: LoadedModel, reader: TokenReader, texts: Sequence[str], form: TextForm, *, target: bool = False
) -> list[Encoded]:
    """Tokenize texts in their form.

    Args:
        target: Tokenize as an encoder-decoder's target.

    Raises:
        InputError: There is no chat template, the tokenizer does not keep two texts apart, or it finds nothing to read
            in one of a pair.
        ModelError: The tokenizer or its template fails.
    """
    if form.chat:
        return _in_chat(loaded, reader, texts)
    second = None if form.pairs is None else list(form.pairs) * (len(texts) if len(form.pairs) == 1 else 1)
    if second is not None:
        _check_separates(loaded, reader)
    name = "text_target" if target else "text"
    if not form.pre_split:
        found = _encoded(loaded, reader, {name: list(texts)} | ({} if second is None else {"text_pair": second}))
    else:
        found = _split(loaded, reader, texts, second)
    if second is None:
        return found
    return [_as_pair(loaded, one, pair) for one, pair in zip(found, zip(texts, second, strict=True), strict=True)]


def _encoded(loaded: LoadedModel, reader: TokenReader, arguments: dict[str, Any]) -> list[Encoded]:
    encoded = _call(loaded, reader, arguments)
    ids, masks, types = encoded["input_ids"], encoded.get("special_tokens_mask"), encoded.get("token_type_ids")
    return [
        Encoded(
            ids=tuple(row),
            template=tuple(map(bool, masks[i])) if masks else (False,) * len(row),
            type_ids=None if types is None else tuple(types[i]),
            word_ids=tuple(encoded.word_ids(i)) if encoded.is_fast else None,
        )
        for i, row in enumerate(ids)
    ]


def _call(loaded: LoadedModel, reader: TokenReader, arguments: dict[str, Any]) -> Any:
    try:
        with quiet():
            return reader.tokenizer(**arguments, return_special_tokens_mask=True)
    except Exception as error:  # a broken tokenizer fails in the class of whatever it is made of
        raise ModelError(f"the tokenizer of {loaded.name} fails: {first_line(error)}", TOKENIZER_HINT) from error


# ------------------------------------------------------------------ pairs
def _check_separates(loaded: LoadedModel, reader: TokenReader) -> None:
    """Refuse tokenizers that write two texts as one."""
    tokenizer = reader.tokenizer
    if tokenizer.num_special_tokens_to_add(pair=True) <= tokenizer.num_special_tokens_to_add(pair=False):
        message = f"the tokenizer of {loaded.name} puts nothing between two texts: it was not made for pairs"
        raise InputError(message, "give both in one text")


def _as_pair(loaded: LoadedModel, one: Encoded, texts: tuple[str, str]) -> Encoded:
    """With its parts: the runs of tokens between those of the template."""
    parts, run = [], -1
    for i, around in enumerate(one.template):
        if not around and (i == 0 or one.template[i - 1]):
            run += 1
        parts.append(-1 if around else run)
    if run != 1:
        shown = " and ".join(repr(text[:40]) for text in texts)
        message = f"the tokenizer of {loaded.name} does not find two texts in {shown}"
        raise InputError(message, "give at least one word in each")
    return replace(one, parts=tuple(parts))


# ------------------------------------------------------------------ words
def _split(
    loaded: LoadedModel, reader: TokenReader, texts: Sequence[str], second: Sequence[str] | None
) -> list[Encoded]:
    """Words that white space separates. Where spaces are a part of pieces, and the tokenizer itself puts none before a
    word, each word but the first gets one: else they would be read as one long word."""
    words, more = [t.split() for t in texts], None if second is None else [t.split() for t in second]
    found = _of_words(loaded, reader, words, more)
    if _run_together(reader, found):
        spaced = [_spaced(one) for one in words], None if more is None else [_spaced(one) for one in more]
        found = _of_words(loaded, reader, *spaced)
    return found


def _of_words(
    loaded: LoadedModel, reader: TokenReader, words: list[list[str]], more: list[list[str]] | None
) -> list[Encoded]:
    arguments: dict[str, Any] = {"text": words, "is_split_into_words": True}
    found = _encoded(loaded, reader, arguments | ({} if more is None else {"text_pair": more}))
    if all(one.word_ids is not None for one in found):
        return [replace(one, given_words=True) for one in found]
    pairs = zip(words, more or [[]] * len(words), strict=True)
    return [_numbered(reader, one, pair) for one, pair in zip(found, pairs, strict=True)]


def _numbered(reader: TokenReader, one: Encoded, texts: tuple[list[str], list[str]]) -> Encoded:
    """With the numbers of the words, for a tokenizer written in Python, which takes one word after the other."""
    counted = iter([i for words in texts for i, word in enumerate(words) for _ in reader.tokenizer.tokenize(word)])
    numbers = tuple(None if around else next(counted, None) for around in one.template)
    return replace(one, word_ids=numbers, given_words=True)


def _spaced(words: list[str]) -> list[str]:
    return [word if i == 0 else f" {word}" for i, word in enumerate(words)]


def _run_together(reader: TokenReader, found: Sequence[Encoded]) -> bool:
    """Whether the tokenizer writes spaces, and none of the words after the first begins with one."""
    if reader.spelling.kind not in ("bytes", "spaces", "characters"):
        return False
    starts = [
        piece
        for one in found
        for i, piece in enumerate(reader.pieces(one.ids))
        if i and one.word_ids is not None and None not in (pair := one.word_ids[i - 1 : i + 1]) and pair[0] != pair[1]
    ]
    return bool(starts) and not any(piece.text[:1].isspace() for piece in starts)


# ------------------------------------------------------------------ chat
def _in_chat(loaded: LoadedModel, reader: TokenReader, texts: Sequence[str]) -> list[Encoded]:
    """Each text as a user's message, with the beginning of the answer; the template writes all special tokens itself.

    What is too long is cut out of the message, so parts tell it from the template.
    """
    if not getattr(reader.tokenizer, "chat_template", None):
        raise InputError(f"the tokenizer of {loaded.name} has no chat template", "leave --chat out")
    before, _, after = rendered(loaded, reader.tokenizer, _PLACE).partition(_PLACE)
    whole = [rendered(loaded, reader.tokenizer, text) for text in texts]
    arguments = {"text": whole, "add_special_tokens": False}
    found = _encoded(loaded, reader, arguments)
    if not getattr(reader.tokenizer, "is_fast", False):
        return found
    spans = _call(loaded, reader, arguments | {"return_offsets_mapping": True})["offset_mapping"]
    result = []
    for one, text, offsets in zip(found, whole, spans, strict=True):
        around = text.startswith(before) and text.endswith(after)
        start, end = len(before), len(text) - len(after)
        parts = tuple(0 if b > start and a < end else -1 for a, b in offsets)
        result.append(replace(one, parts=parts) if around and 0 in parts else one)
    return result


def rendered(loaded: LoadedModel, templated: Any, content: Any) -> str:
    """A user's message in the chat template of a tokenizer or processor, and the beginning of the answer."""
    try:
        with quiet():
            message = [{"role": "user", "content": content}]
            return str(templated.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template raises what it likes
        message_text = f"the chat template of {loaded.name} fails: {first_line(error)}"
        raise ModelError(message_text, "leave --chat out") from error
