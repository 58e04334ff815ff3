"""The options of `headscope prune` for heads that scores choose, for repair and for the curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headscope.cli import options
from headscope.errors import InputError

# The registry's names, so that help needs no torch; a test compares them.
METHODS = (
    "gradient",
    "gradient-token",
    "ablation",
    "surgeon",
    "reconstruction",
    "confidence",
    "magnitude",
    "random",
)
WITHOUT_DATA = ("magnitude", "random")
FOR_REPAIR = ("surgeon", "reconstruction")
PICTURES = (".png", ".svg", ".pdf")
ONLY_WITH_REPAIR = "of use with --repair only: without it, gradient is better"

_CHOICE = "Heads by their scores"
_REPAIR = "Repair"
_CURVE = "Curve"

Scores = Annotated[
    Path | None,
    typer.Option(
        "--scores",
        metavar="FILE",
        help="Remove the heads that headscope importance gave the lowest scores, from its JSON file.",
        rich_help_panel=_CHOICE,
    ),
]
PruneMethod = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        help=f"Score heads now, by {', '.join(METHODS[:-1])} or {METHODS[-1]}.",
        rich_help_panel=_CHOICE,
    ),
]
PruneData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Texts to score on, to select by and to report on, none for two of these: .txt (a text a line), .jsonl, "
        ".csv, .parquet, a directory or pattern of those.",
        rich_help_panel=_CHOICE,
    ),
]
Drop = Annotated[
    float | None,
    typer.Option("--drop", metavar="SHARE", help="How much goes: 0.3; rounded down.", rich_help_panel=_CHOICE),
]
UntilDrop = Annotated[
    str | None,
    typer.Option(
        "--until-drop",
        metavar="LOSS",
        help="As much goes as loses less than this, 1%: of perplexity, or of the cosine to the original's output.",
        rich_help_panel=_CHOICE,
    ),
]
Unit = Annotated[
    Literal["head", "kv-group"] | None,
    typer.Option(
        "--unit",
        help="What goes as a whole: a head, or all heads that share a key-value head. Default: what can leave.",
        show_default=False,
        rich_help_panel=_CHOICE,
    ),
]
MinPerLayer = Annotated[
    int,
    typer.Option(
        "--min-per-layer", min=1, metavar="N", help="Heads or groups that each layer keeps.", rich_help_panel=_CHOICE
    ),
]
Steps = Annotated[
    int,
    typer.Option("--steps", min=1, metavar="N", help="Score anew this many times.", rich_help_panel=_CHOICE),
]
Repair = Annotated[
    Path | None,
    typer.Option(
        "--repair",
        metavar="FILE",
        help="Refit the output projections on these texts, so that what is left makes up for what went. Best with "
        "25,000 varied tokens or more. The file of --data may be named again: its texts are dealt out.",
        rich_help_panel=_REPAIR,
    ),
]
RepairMlp = Annotated[
    bool,
    typer.Option(
        "--repair-mlp",
        help="Refit the down projections, too: this helps only on text like that of --repair.",
        rich_help_panel=_REPAIR,
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        min=1,
        metavar="N",
        help="Tokens of a piece of text; 256 unless given, or the model's limit.",
        rich_help_panel="Input",
    ),
]
CurvePicture = Annotated[
    Path | None,
    typer.Option(
        "--curve",
        metavar="FILE",
        help="Instead of pruning, draw what removing 10, 20, 30 and 50 % costs, with a repair and without (.png, .svg "
        "or .pdf), and write the numbers beside it (.csv).",
        rich_help_panel=_CURVE,
    ),
]
CurveMethods = Annotated[
    str | None,
    typer.Option(
        "--curve-methods",
        metavar="METHODS",
        help="With commas. Default: random,gradient,reconstruction,surgeon.",
        rich_help_panel=_CURVE,
    ),
]


def check_method(name: str) -> None:
    """Raise InputError for a method that does not exist."""
    if name not in METHODS:
        raise InputError(f"there is no importance method {name!r}", f"methods: {', '.join(METHODS)}")


def check_choice(given: Mapping[str, Any]) -> None:
    """Refuse options that make no sense together, before anything is loaded.

    Args:
        given: Values by parameter name; what was not given is None, False or, for numbers, 1.

    Raises:
        InputError: The first thing that is wrong, in the options' names.
    """
    ways = [f"--{name}" for name in ("heads", "scores", "method", "curve") if given[name]]
    if not ways:
        raise InputError(
            "nothing says which heads go",
            'give --heads "5:0,3", or --scores FILE or --method METHOD with --drop 0.3, or --curve FILE.png',
        )
    if len(ways) > 1:
        raise InputError(f"{' and '.join(ways)} exclude each other", "leave all but one of them out")
    if given["method"]:
        check_method(given["method"])
    rules = _curve_rules if given["curve"] else _pruning_rules
    for wrong, problem, hint in rules(given):
        if wrong:
            raise InputError(problem, hint)


_Rules = Iterator[tuple[bool, str, str]]
# What pruning takes and measuring a curve does not.
_NOT_FOR_CURVES = ("drop", "until_drop", "output", "eval", "shapes", "dry_run", "pad", "allow_empty")


def _pruning_rules(given: Mapping[str, Any]) -> _Rules:
    method, scored = given["method"], bool(given["scores"] or given["method"])
    limits = [name for name in ("drop", "until_drop", "unit") if given[name] is not None]
    limits += [name for name in ("min_per_layer", "steps") if given[name] != 1]
    named = _option(limits[0]) if limits else ""
    yield not scored and bool(limits), f"{named} needs scores to go by", "give --scores FILE or --method METHOD"
    yield (
        given["drop"] is not None and given["until_drop"] is not None,
        "--drop and --until-drop exclude each other",
        "give a share that goes, or a loss that it may not exceed",
    )
    yield (
        scored and given["drop"] is None and given["until_drop"] is None,
        "nothing says how much goes",
        "add --drop 0.3, or --until-drop 1%",
    )
    yield (
        given["steps"] > 1 and not (method and given["drop"] is not None),
        "--steps scores anew for each part of a share, which needs --method and --drop",
        "give both, or leave --steps out",
    )
    wants_texts = bool(method) and method not in WITHOUT_DATA
    yield wants_texts and given["data"] is None, f"--method {method} needs texts", "add --data FILE"
    yield given["until_drop"] is not None and given["data"] is None, "--until-drop needs texts", "add --data FILE"
    yield (
        method in FOR_REPAIR and given["repair"] is None,
        f"--method {method} is {ONLY_WITH_REPAIR}",
        "add --repair FILE, or take --method gradient",
    )
    yield given["repair_mlp"] and given["repair"] is None, "--repair-mlp needs --repair", "add --repair FILE"
    yield (
        bool(given["heads"]) and given["data"] is not None and given["repair"] is None,
        "--data is there to choose heads by, and --heads names them",
        "take --eval FILE to measure quality",
    )
    yield given["curve_methods"] is not None, "--curve-methods needs --curve", "add --curve FILE.png"


def _curve_rules(given: Mapping[str, Any]) -> _Rules:
    extra = [name for name in _NOT_FOR_CURVES if given[name]]
    extra += ["steps"] if given["steps"] != 1 else []
    named = _option(extra[0]) if extra else ""
    yield bool(extra), f"{named} is for pruning, and --curve only measures", "leave one of the two out"
    yield given["data"] is None, "--curve needs texts", "add --data FILE"
    suffix = given["curve"].suffix.lower()
    yield suffix not in PICTURES, f"--curve draws {', '.join(PICTURES)}, not {suffix!r}", "name such a file"
    methods = curve_methods(given["curve_methods"])
    yield (
        given["curve_methods"] is not None and not methods,
        "--curve-methods names none",
        "leave it out for the usual ones",
    )
    for name in methods or ():
        check_method(name)


def curve_methods(given: str | None) -> list[str] | None:
    """The names of `--curve-methods`; None where none were given."""
    return options.names([given]) if given is not None else None


def repair_source(repair: Path | None, data: Path | None) -> str | bool:
    """What the Python API takes: the file, or True where it is that of `--data`, whose texts are then dealt out."""
    if repair is None:
        return False
    return True if data is not None and repair.absolute() == data.absolute() else str(repair)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
