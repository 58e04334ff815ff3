"""Readable tokens: labels without the tokenizers' own signs, and which pieces make up a word.

Tokenizers mark the spelling of a text in four ways: `Ġ` for bytes moved to printable characters, `▁` for a space,
`##` for a continued word, and a suffix (`</w>`, `@@`) at the end of a word or of a piece. All four are read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

SIGNS = {"\n": "↵", "\r": "␍", "\t": "⇥"}
SPACE = "␣"
SPECIAL_ROLES = ("bos", "eos", "sep", "cls", "pad", "mask")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SHOWN_BYTES = re.compile(r"(?:⟨[0-9A-F]{2}⟩)+")


@dataclass(frozen=True)
class Spelling:
    """How a tokenizer writes its pieces.

    Attributes:
        kind: `bytes` (Ġ), `spaces` (▁), `continued` (##), `continued@@`, `suffix` (</w>), `characters` (a byte each)
            or `plain`.
        word_end: Suffix of a word's last piece (`</w>`), where there is one.
        added: Text of the tokens that were added to the vocabulary as they are, by id.
    """

    kind: str
    word_end: str
    added: dict[int, str]


@dataclass(frozen=True)
class Piece:
    """One token: its text with its own spaces (bytes of broken characters as surrogates), and what its signs say.

    Attributes:
        text: What the token stands for.
        continues: The token says that it continues the word before it.
        ends: The token says that its word ends here; None where it says nothing.
    """

    text: str
    continues: bool = False
    ends: bool | None = None


def spelling_of(tokenizer: PreTrainedTokenizerBase) -> Spelling:
    """Find out how a tokenizer writes its pieces, from its components where it shows them, else from its vocabulary."""
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return Spelling(*_kind_by_vocabulary(tokenizer), added)
    word_end = getattr(backend.model, "end_of_word_suffix", None) or ""
    parts = " ".join(_state(part) for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder))
    if type(backend.model).__name__ == "WordPiece":
        kind = "continued"
    elif "ByteLevel" in parts:
        kind = "bytes"
    elif "Metaspace" in parts or "▁" in parts:
        kind = "spaces"
    else:
        kind = "suffix" if word_end else "plain"
    return Spelling(kind, word_end, added)


def _state(part: Any) -> str:
    """The JSON of one component of a fast tokenizer, without the vocabulary that the whole would carry."""
    return "" if part is None else json.dumps(json.loads(part.__getstate__()), ensure_ascii=False)


def _kind_by_vocabulary(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Kind and word end of a tokenizer written in Python."""
    if getattr(tokenizer, "_utf_vocab_size", None) == 256:
        return "characters", ""
    pieces = list(tokenizer.get_vocab())
    counts = {
        "spaces": sum(p.startswith("▁") for p in pieces),
        "bytes": sum(p.startswith("Ġ") for p in pieces),
        "continued": sum(p.startswith("##") for p in pieces),
        "suffix": sum(p.endswith("</w>") for p in pieces),
        "continued@@": sum(p.endswith("@@") for p in pieces),
    }
    best = max(counts, key=lambda kind: counts[kind])
    return (best if counts[best] else "plain"), ("</w>" if best == "suffix" else "")


class TokenReader:
    """Reads a tokenizer's token numbers.

    Attributes:
        tokenizer: The tokenizer, which is not changed.
        spelling: How it writes its pieces.
        special: Numbers of its special tokens, of a chat template's marks too. The unknown token is a word, unless it
            has another role as well.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.spelling = spelling_of(tokenizer)
        roles = {getattr(tokenizer, f"{role}_token_id", None) for role in SPECIAL_ROLES}
        marked = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = {n for n in {*tokenizer.all_special_ids, *marked} if n != tokenizer.unk_token_id or n in roles}
        self._known: dict[int, Piece] = {n: Piece(text) for n, text in self.spelling.added.items()}

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """The tokens as pieces of text; an id that the tokenizer does not know becomes its number."""
        for number in set(ids) - self._known.keys():
            try:
                token = self.tokenizer.convert_ids_to_tokens(number)
            except (IndexError, KeyError, ValueError, OverflowError):
                token = None
            self._known[number] = Piece(str(number)) if token is None else _read(str(token), self.spelling)
        return [self._known[number] for number in ids]

    def read(
        self, ids: Sequence[int], special: Sequence[bool], word_ids: Sequence[int | None] | None = None
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Labels and word numbers, one each a token. `word_ids` are a fast tokenizer's own."""
        pieces = self.pieces(ids)
        return labels_of(pieces), words_of(pieces, special, self.spelling, word_ids)


def _read(token: str, spelling: Spelling) -> Piece:
    if spelling.kind == "continued":
        return Piece(token[2:], continues=True) if token.startswith("##") and len(token) > 2 else Piece(token)
    if spelling.kind == "spaces":
        byte = _BYTE_PIECE.fullmatch(token)
        if byte is not None:
            return Piece(bytes([int(byte[1], 16)]).decode("utf-8", "surrogateescape"))
        return Piece(token.replace("▁", " "))
    if spelling.kind == "characters":
        is_byte = len(token) == 1 and token < "\u0100"
        return Piece(token.encode("latin-1").decode("utf-8", "surrogateescape") if is_byte else token)
    if spelling.kind == "continued@@":
        return Piece(token.removesuffix("@@"), ends=not token.endswith("@@"))
    ends = None
    if spelling.word_end:
        ends, token = token.endswith(spelling.word_end), token.removesuffix(spelling.word_end)
    if spelling.kind == "bytes" and all(c in _BYTES for c in token):
        token = bytes(_BYTES[c] for c in token).decode("utf-8", "surrogateescape")
    return Piece(token, ends=ends)


def _printable_bytes() -> dict[str, int]:
    """Byte-level BPE's table: printable Latin-1 characters are themselves, the others are counted up from U+0100.

    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2, and its released code.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_BYTES = _printable_bytes()


def labels_of(pieces: Sequence[Piece]) -> tuple[str, ...]:
    """One readable label a piece, without the spaces around it; bytes that are no whole character show as `⟨E4⟩`."""
    return tuple(_label(piece.text) for piece in pieces)


def _label(text: str) -> str:
    shown = text.strip(" ") or SPACE * min(max(len(text), 1), 4)
    return "".join(f"⟨{ord(c) - 0xDC00:02X}⟩" if "\udc80" <= c <= "\udcff" else SIGNS.get(c, c) for c in shown)


def join_labels(labels: Sequence[str]) -> str:
    """The label of the word that pieces with these labels make up: its text, with split characters whole again."""
    if len(labels) == 1:
        return labels[0]
    joined = _SHOWN_BYTES.sub(_whole_characters, "".join(labels))
    return joined.strip(SPACE) or joined


def _whole_characters(match: re.Match[str]) -> str:
    text = bytes.fromhex(re.sub("[⟨⟩]", "", match[0])).decode("utf-8", "surrogateescape")
    return _label(text)


def words_of(
    pieces: Sequence[Piece], special: Sequence[bool], spelling: Spelling, word_ids: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """The number of the word that each piece belongs to, from 0 upward; special tokens are words of their own.

    Spaces decide where the tokenizer keeps them, so `don't` is one word even where it is split by a rule; WordPiece
    has lost them, and there only `##` joins. `word_ids` (a fast tokenizer's own numbers) are used where pieces carry no
    signs at all.
    """
    numbers: list[int] = []
    for i, piece in enumerate(pieces):
        first = i == 0 or special[i] or special[i - 1]
        if not first and spelling.kind == "plain":
            joined = word_ids is not None and word_ids[i] is not None and word_ids[i] == word_ids[i - 1]
        else:
            joined = not first and _joins(pieces[i - 1], piece, spelling)
        numbers.append((numbers[-1] if numbers else -1) + (not joined))
    return tuple(numbers)


def _joins(before: Piece, piece: Piece, spelling: Spelling) -> bool:
    if spelling.kind == "continued":
        return piece.continues
    if before.ends is not None:
        return not before.ends
    if piece.text[:1].isspace():
        return False
    return not before.text[-1:].isspace() or not before.text.strip(" ")
