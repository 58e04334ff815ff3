"""What the user gave to measure, checked before any model is loaded."""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from headscope.errors import InputError

# No vocabulary has more, and Python refuses to read thousands of digits.
_ID = re.compile(r"[0-9]{1,18}")


def given(
    texts: Sequence[str] | None,
    file: Path | None,
    ids: Sequence[str] | None,
    decoder_texts: Sequence[str] | None,
    images: Sequence[Path] | None,
    sounds: Sequence[Path] | None,
) -> dict[str, Any]:
    """The inputs of `headscope.analyze`. Raises InputError where one is not right, or they do not go together."""
    found = {
        "texts": read_texts(texts, file) or None,
        "ids": parse_ids(ids),
        "images": check_files(images, "image"),
        "audio": check_files(sounds, "sound"),
        "decoder_texts": list(decoder_texts or []) or None,
    }
    check_combination(texts or file, found["ids"], decoder_texts, found["images"] or found["audio"])
    return found


def read_texts(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    """The texts of the command line, then the file's.

    Raises:
        InputError: A text is empty or not UTF-8, or the file cannot be read.
    """
    found = list(texts or [])
    if file is not None:
        found.append(_read_file(file))
    for text in found:
        _check_text(text)
    return found


def parse_ids(given: Sequence[str] | None) -> list[list[int]] | None:
    """Token ids by sequence, from strings such as `101 7592 102` (commas do as well)."""
    if not given:
        return None
    return [_parse_sequence(text) for text in given]


def check_files(paths: Sequence[Path] | None, kind: str) -> list[str] | None:
    """The paths as strings. Raises InputError if one of them is no file that can be opened."""
    for path in paths or []:
        _opened(path, kind).close()
    return [str(path) for path in paths] if paths else None


def check_combination(texts: object, ids: object, decoder_texts: object, media: object) -> None:
    """Refuse nothing at all, and what excludes each other: token ids and text."""
    if ids and texts:
        raise InputError("--ids and texts exclude each other", "give either the token ids or the text")
    if not (texts or ids or media):
        said = "there is only --decoder-text" if decoder_texts else "there is no text"
        raise InputError(
            f"nothing to measure: {said}", 'headscope analyze "some text", or --file PATH (- for standard input)'
        )


def _read_file(path: Path) -> str:
    from headscope.reading.whole import bytes_of

    if str(path) == "-":
        data = bytes_of(sys.stdin.buffer, "standard input")
    else:
        with _opened(path, "text") as file:
            data = bytes_of(file, str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise InputError(f"{path} is not UTF-8 text (byte {exc.start})", "convert it to UTF-8 first") from exc
    # Editors end a file with a newline that is no part of the text.
    return text.removesuffix("\n").removesuffix("\r")


def _opened(path: Path, kind: str) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as exc:
        raise InputError(
            f"cannot read the {kind} file {path}: {exc.strerror}", "check the path and its permissions"
        ) from exc


def _check_text(text: str) -> None:
    if not text.strip():
        raise InputError("empty text", "give at least one word")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError("a text is not valid UTF-8", "set the terminal to UTF-8, or put the text in a file for --file")


def _parse_sequence(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words:
        raise InputError("--ids is empty", 'write token ids with spaces between them: --ids "101 7592 102"')
    for word in words:
        if not _ID.fullmatch(word):
            raise InputError(f"--ids: {reprlib.repr(word)} is not a token id", "token ids are whole numbers from 0 up")
    return [int(word) for word in words]
