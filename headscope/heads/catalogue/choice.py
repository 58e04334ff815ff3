"""Which types of heads are asked for, and what they need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headscope.errors import InputError, check_type
from headscope.heads.catalogue.text_types import TEXT_TYPES, TextType


@dataclass(frozen=True)
class ProbeType:
    """A type that brings its own inputs, or looks at more than single heads.

    Attributes:
        needs_head: Whether it needs the model's language-model head.
        files: Names of the options without which it cannot be measured.
    """

    name: str
    description: str
    source: str
    needs_head: bool = False
    files: tuple[str, ...] = ()


PROBE_TYPES: dict[str, ProbeType] = {
    t.name: t
    for t in (
        ProbeType(
            "copying",
            "its weights raise the logit of the token that it attends to",
            "Elhage et al. 2021; Olsson et al. 2022",
            needs_head=True,
        ),
        ProbeType(
            "syntax",
            "attends to the other end of a dependency",
            "Clark et al. 2019; Voita et al. 2019",
            files=("conllu",),
        ),
        ProbeType("coreference", "attends to the antecedent of a mention", "Clark et al. 2019", files=("mentions",)),
        ProbeType(
            "retrieval",
            "attends to the token that is copied from far away",
            "Wu et al. 2025",
            needs_head=True,
            files=("haystack", "needles"),
        ),
        ProbeType("redundant", "attends to nearly the same as another head", "Clark et al. 2019, section 6"),
    )
}
OFFSETS = tuple(name for name in TEXT_TYPES if name.startswith("offset"))
GROUPS = {
    "offset": OFFSETS,
    "positional": ("self_attend", "previous_token", "next_token", *OFFSETS, "local_window"),
    "sink": ("first_token", "special_token", "delimiter", "column_sink"),
    "entropy": ("focused", "broad"),
    "repetition": ("duplicate_token", "induction", "copying"),
}
_ABLATED = "induction"


@dataclass(frozen=True)
class Choice:
    """What to look for.

    Attributes:
        names: Types, in the catalogue's order.
        named: Those that were asked for by their own names. Of others, of a group or of all, what cannot be measured is
            left out and not refused.
        files: Paths by option: `conllu`, `mentions`, `haystack`, `needles`.
        ablate: Whether to check what zeroing the strongest induction heads does.
        seed: Of everything random.
    """

    names: tuple[str, ...]
    named: frozenset[str]
    files: dict[str, Path]
    ablate: bool = False
    seed: int = 0

    @property
    def text_types(self) -> tuple[TextType, ...]:
        """Those that are measured on the given text; all, where one is asked for that any other explains."""
        wanted = tuple(TEXT_TYPES[n] for n in self.names if n in TEXT_TYPES)
        return tuple(TEXT_TYPES.values()) if any(t.residual for t in wanted) else wanted

    @property
    def needs_head(self) -> bool:
        """Whether any of it needs the model's language-model head."""
        return self.ablate or any(PROBE_TYPES[n].needs_head for n in self.names if n in PROBE_TYPES)


def choose(
    types: str | Sequence[str] | None,
    *,
    conllu: str | os.PathLike[str] | None = None,
    mentions: str | os.PathLike[str] | None = None,
    haystack: str | os.PathLike[str] | None = None,
    needles: str | os.PathLike[str] | None = None,
    ablate: bool = False,
    seed: int = 0,
) -> Choice | None:
    """What a caller asks for; None for no types.

    Args:
        types: `all`, or names of types or of their groups, with commas or as a list; with `ablate` alone, induction.

    Raises:
        InputError: No such type; a file that is missing, or of no use to what is asked for.
    """
    given = {"conllu": conllu, "mentions": mentions, "haystack": haystack, "needles": needles}
    for name, path in given.items():
        check_type(name, path, (str, os.PathLike), "the path of a file")
    files = {name: Path(path) for name, path in given.items() if path is not None}
    if types is None:
        if files:
            raise InputError(f"--{next(iter(files))} without --types", "Add --types all, or the type that reads it.")
        if not ablate:
            return None
        types = _ABLATED
    check_type("types", types, (str, list, tuple, set, frozenset), "names with commas, or a list of them")
    several = types.split(",") if isinstance(types, str) else list(types)
    for one in several:
        check_type("one of types", one, str, "a name")
    names = [n.strip() for n in several if n.strip()]
    known = (*TEXT_TYPES, *PROBE_TYPES)
    wanted = _named(names, known)
    if ablate and _ABLATED not in wanted:
        raise InputError("the ablation check needs the type induction", "Add induction to --types.")
    _check_files(wanted, files, set(names))
    return Choice(tuple(n for n in known if n in wanted), frozenset(names), files, ablate, seed)


def _named(names: Sequence[str], known: Sequence[str]) -> set[str]:
    if not names:
        raise InputError("--types names no type", f"Types: all, {', '.join((*GROUPS, *known))}.")
    wanted: set[str] = set()
    groups = {"all": tuple(known), **GROUPS}
    for name in names:
        if name not in known and name not in groups:
            raise InputError(f"unknown type '{name}'", f"Types: {', '.join((*groups, *known))}.")
        wanted |= set(groups.get(name, (name,)))
    return wanted


def _check_files(wanted: set[str], files: dict[str, Path], named: set[str]) -> None:
    for name, path in files.items():
        if not os.path.isfile(path):
            raise InputError(f"--{name}: there is no file {path}", "check the path")
        reading = [t.name for t in PROBE_TYPES.values() if name in t.files]
        if not wanted & set(reading):
            raise InputError(f"--{name} is only read for the type {reading[0]}", f"Add {reading[0]} to --types.")
    for kind in (PROBE_TYPES[n] for n in wanted if n in PROBE_TYPES):
        missing = [name for name in kind.files if name not in files]
        if missing and (kind.name in named or len(missing) < len(kind.files)):
            options = " and ".join(f"--{name} FILE" for name in missing)
            raise InputError(f"the type {kind.name} needs {options}", "docs/head-types.md shows what is in it.")
