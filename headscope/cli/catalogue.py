"""`analyze --types`: the options of the head catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headscope.cli.progress import notes

_CATALOGUE = "Head catalogue"

Types = Annotated[
    str | None,
    typer.Option(
        "--types",
        metavar="TYPES",
        help="Types of heads to look for: all, or names with commas, such as induction, previous_token, sink, syntax.",
        rich_help_panel=_CATALOGUE,
    ),
]
Conllu = Annotated[
    Path | None,
    typer.Option("--conllu", metavar="FILE", help="Dependency trees, for syntax.", rich_help_panel=_CATALOGUE),
]
Mentions = Annotated[
    Path | None,
    typer.Option(
        "--mentions",
        metavar="FILE",
        help="Mentions in JSON Lines or CoNLL-2012 columns, for coreference.",
        rich_help_panel=_CATALOGUE,
    ),
]
Haystack = Annotated[
    Path | None,
    typer.Option(
        "--haystack", metavar="FILE", help="A long text to hide needles in, for retrieval.", rich_help_panel=_CATALOGUE
    ),
]
Needles = Annotated[
    Path | None,
    typer.Option(
        "--needles", metavar="FILE", help="Sentences to hide, in JSON Lines, for retrieval.", rich_help_panel=_CATALOGUE
    ),
]
AblateCheck = Annotated[
    bool,
    typer.Option(
        "--ablate-check",
        help="Also zero the ten strongest induction heads, and others, on repeated random tokens.",
        rich_help_panel=_CATALOGUE,
    ),
]


def arguments(
    types: str | None,
    conllu: Path | None,
    mentions: Path | None,
    haystack: Path | None,
    needles: Path | None,
    ablate_check: bool,
    quiet: bool,
) -> dict[str, Any]:
    """The catalogue's arguments of `headscope.analyze`; none where nothing of it is asked for."""
    files = {"conllu": conllu, "mentions": mentions, "haystack": haystack, "needles": needles}
    given = {"types": types, "ablate_check": ablate_check or None, **files}
    asked = {name: value for name, value in given.items() if value is not None}
    say = notes(quiet) if asked else None
    return asked if say is None else {**asked, "say": say}
