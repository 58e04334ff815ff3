"""The options that every model command shares, written once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

_MODEL = "Model"
_INPUT = "Input"
_OUTPUT = "Output"

Texts = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="Texts to measure; each argument is one text.", show_default=False),
]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--file", metavar="PATH", help="One text from a UTF-8 file; - is standard input.", rich_help_panel=_INPUT
    ),
]
Ids = Annotated[
    list[str] | None,
    typer.Option(
        "--ids", metavar="IDS", help='Token ids as they are, "101 7592 102"; no tokenizer.', rich_help_panel=_INPUT
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="NAME",
        help="Another tokenizer than the model's: hub id or directory.",
        rich_help_panel=_INPUT,
    ),
]
DecoderTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--decoder-text",
        metavar="TEXT",
        help="What an encoder-decoder writes, one for each text; without it, one is generated greedily.",
        rich_help_panel=_INPUT,
    ),
]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="PATH", help="An image for a vision model.", rich_help_panel=_INPUT),
]
Sounds = Annotated[
    list[Path] | None,
    typer.Option("--audio", metavar="PATH", help="A sound file for an audio model.", rich_help_panel=_INPUT),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        min=1,
        metavar="N",
        help="Tokens kept of each text; the model's limit unless given. Truncation is reported.",
        rich_help_panel=_INPUT,
    ),
]
StrictLength = Annotated[
    bool,
    typer.Option("--strict-length", help="Refuse a text that is too long, do not cut it.", rich_help_panel=_INPUT),
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, metavar="N", help="Texts run at once.", rich_help_panel=_INPUT),
]

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="Hub id, local directory or .gguf file. Default: $HEADSCOPE_MODEL, else the packaged model (demo extra), "
        "else google-bert/bert-base-uncased.",
        rich_help_panel=_MODEL,
    ),
]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Hub revision.", rich_help_panel=_MODEL)
]
Layer = Annotated[
    str,
    typer.Option(
        "--layer",
        "-l",
        metavar="LAYERS",
        help="5, -1, 0,2,5, 3-7 or all: the model's own layer numbers; negative ones count from the end.",
        rich_help_panel=_MODEL,
    ),
]
Head = Annotated[
    str, typer.Option("--head", metavar="HEADS", help="Heads of those layers, written alike.", rich_help_panel=_MODEL)
]
Stacks = Annotated[
    list[str] | None,
    typer.Option(
        "--stack",
        metavar="STACK",
        help="encoder, decoder, cross, text, vision, audio, self or a module path prefix; may be repeated.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, mps, …", rich_help_panel=_MODEL),
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="float32, bfloat16, float16; the checkpoint's unless given.",
        rich_help_panel=_MODEL,
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option("--device-map", metavar="MAP", help="Spread the model, as in transformers.", rich_help_panel=_MODEL),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the model.", rich_help_panel=_MODEL),
]

Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        "-f",
        metavar="FORMAT",
        help="table, json, jsonl, csv or markdown. Default: by the output file's suffix, else table.",
        rich_help_panel=_OUTPUT,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write a file, not standard output.", rich_help_panel=_OUTPUT),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what exists.", rich_help_panel=_OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", help="No header and no progress.", rich_help_panel=_OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUTPUT)]
Seed = Annotated[
    int,
    typer.Option("--seed", min=0, max=2**32 - 1, metavar="N", help="For everything random.", rich_help_panel=_MODEL),
]


def names(given: Sequence[str] | None) -> list[str] | None:
    """Names from an option that may be repeated or hold several with commas; None for none."""
    found = [name.strip() for part in given or [] for name in part.split(",")]
    return [name for name in found if name] or None
