"""The options that say in what form texts are read, for every command that looks at texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from headscope.models.text_form import text_form

_FORM = "Form of the texts"

Generate = Annotated[
    int | None,
    typer.Option(
        "--generate",
        min=1,
        metavar="N",
        help="Let the model continue each text greedily by N tokens at most, and look at both together; for an "
        "encoder-decoder, what its decoder writes at most.",
        rich_help_panel=_FORM,
    ),
]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Put the model's own chat template around each text.", rich_help_panel=_FORM),
]
Pair = Annotated[
    list[str] | None,
    typer.Option(
        "--pair",
        metavar="TEXT",
        help="A second text, for models that read two; one for all texts, or one each.",
        rich_help_panel=_FORM,
    ),
]
PreSplit = Annotated[
    bool,
    typer.Option("--pre-split", help="Words are split already, by white space.", rich_help_panel=_FORM),
]


def arguments(
    generate: int | None, chat: bool, pair: Sequence[str] | None, pre_split: bool, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of `headscope.analyze` that were given.

    Args:
        found: The other input, of `headscope.cli.inputs.given`.

    Raises:
        InputError: They do not go together, or not with the other input.
    """
    text_form(generate, chat, list(pair) if pair else None, pre_split, found)
    given = {"generate": generate, "chat": chat, "pairs": list(pair or []), "pre_split": pre_split}
    return {name: value for name, value in given.items() if value}
