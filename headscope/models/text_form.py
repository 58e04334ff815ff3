"""In what form texts are read: continued by the model, in its chat template, in pairs, or as words already split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headscope.errors import InputError
from headscope.models.selection import check_count


@dataclass(frozen=True)
class TextForm:
    """The form of all texts of one input.

    Attributes:
        generate: Tokens by which the model continues each text at most, or that an encoder-decoder's decoder writes at
            most; None for none, and for the decoder's usual number.
        chat: Each text is a user's message in the tokenizer's chat template.
        pairs: Second texts, as many as texts, or one for all.
        pre_split: White space separates the words, and each word is tokenized by itself.
    """

    generate: int | None = None
    chat: bool = False
    pairs: tuple[str, ...] | None = None
    pre_split: bool = False


PLAIN = TextForm()


def text_form(
    generate: int | None,
    chat: bool,
    pairs: str | Sequence[str] | None,
    pre_split: bool,
    given: Mapping[str, Any],
) -> TextForm:
    """The form, checked against the other input before any model is loaded.

    Args:
        given: The other input by its name in `headscope.analyze`: `texts`, `ids`, `decoder_texts`, `images`, `audio`
            and `inputs`; None for what is not given.

    Raises:
        InputError: A value is not right, or does not go together with the other input.
    """
    present = {name for name, value in given.items() if value is not None}
    _check_generate(generate, present)
    second = None if pairs is None else _second_texts(pairs, given.get("texts"))
    # What each needs, and what it has no place beside.
    for name, on in (("chat", chat), ("pairs", second), ("pre_split", pre_split)):
        if on and "texts" not in present:
            raise InputError(f"{_NAMES[name]} needs texts", "give a text, or leave it out")
        for other in ("ids", "inputs", *(("images", "audio") if name != "chat" else ())):
            if on and other in present:
                raise InputError(f"{_NAMES[name]} and {_NAMES[other]} exclude each other", "give one of them")
    for name, on in (("pairs", second), ("pre_split", pre_split)):
        if chat and on:
            raise InputError(f"{_NAMES['chat']} and {_NAMES[name]} exclude each other", "give one of them")
    return TextForm(generate, bool(chat), second, bool(pre_split))


_NAMES = {
    "chat": "the chat template",
    "pairs": "a second text (pair)",
    "pre_split": "splitting at white space (pre-split)",
    "ids": "token ids",
    "inputs": "ready inputs",
    "images": "images",
    "audio": "sounds",
    "decoder_texts": "a given decoder text",
}


def _check_generate(generate: int | None, present: set[str]) -> None:
    if generate is None:
        return
    check_count("generate", generate)
    for other in ("decoder_texts", "inputs"):
        if other in present:
            raise InputError(f"generating text and {_NAMES[other]} exclude each other", "give one of them")


def _second_texts(pairs: str | Sequence[str], texts: Any) -> tuple[str, ...]:
    second = (pairs,) if isinstance(pairs, str) else tuple(pairs)
    if not all(isinstance(text, str) and text.strip() for text in second) or not second:
        raise InputError("the second text of a pair is empty", "give at least one word")
    count = 1 if texts is None or isinstance(texts, str) else len(texts)
    if len(second) not in (1, count):
        raise InputError(f"{len(second)} second texts for {count} texts", "give one for all, or one each")
    return second
