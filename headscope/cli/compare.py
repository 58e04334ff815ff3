"""`headscope compare`: two models on the same texts, head by head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import headscope
from headscope.cli import analyze, corpus, inputs, options
from headscope.cli.errors import reported, say
from headscope.cli.guided import PICTURES
from headscope.cli.output import Sink, check_target, print_table, replacing
from headscope.cli.progress import progress, show
from headscope.errors import InputError
from headscope.files import together
from headscope.models.selection import parse_selection

if TYPE_CHECKING:
    from headscope.comparison.result import Comparison

_INPUT = "Input"

ModelA = Annotated[
    str, typer.Argument(metavar="MODEL_A", help="Hub id, local directory or .gguf file.", show_default=False)
]
ModelB = Annotated[str, typer.Argument(metavar="MODEL_B", help="What it is compared with; differences are B less A.")]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="Texts of a small corpus: .txt (a text a line), .jsonl, .csv, .parquet or .conllu, a directory or pattern "
        "of those, - for standard input, or a dataset. Of more than 2,000, 2,000 are drawn.",
        rich_help_panel=_INPUT,
    ),
]
TextColumn = Annotated[
    str | None,
    typer.Option("--text-column", metavar="NAME", help="Where texts are found; text.", rich_help_panel=_INPUT),
]
Sample = Annotated[
    int | None,
    typer.Option(
        "--sample", min=1, metavar="N", help="Only so many of its texts, drawn with --seed.", rich_help_panel=_INPUT
    ),
]
RevisionB = Annotated[
    str | None,
    typer.Option(
        "--revision-b", metavar="REV", help="Hub revision of MODEL_B; --revision is MODEL_A's.", rich_help_panel="Model"
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture",
        metavar="FILE",
        help="Also draw distances and the matching there (.png, .svg or .pdf).",
        rich_help_panel="Output",
    ),
]


def compare(
    model_a: ModelA,
    model_b: ModelB,
    text: options.Texts = None,
    file: options.TextFile = None,
    ids: options.Ids = None,
    tokenizer: options.Tokenizer = None,
    decoder_text: options.DecoderTexts = None,
    image: options.Images = None,
    audio: options.Sounds = None,
    data: Data = None,
    text_column: TextColumn = None,
    sample: Sample = None,
    max_length: options.MaxLength = None,
    strict_length: options.StrictLength = False,
    batch_size: options.BatchSize = None,
    revision: options.Revision = None,
    revision_b: RevisionB = None,
    layer: options.Layer = "all",
    head: options.Head = "all",
    stack: options.Stacks = None,
    device: options.Device = "auto",
    dtype: options.DType = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    rules: analyze.Rules = "seed",
    metrics: analyze.Metrics = "core",
    engine: analyze.Engine = "auto",
    words: analyze.Words = False,
    exclude_special: analyze.ExcludeSpecial = False,
    format: options.Format = None,
    output: options.Output = None,
    picture: Picture = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Compare two models on the same texts: labels, metrics, distances, and which head is which."""
    with reported(debug):
        sink = Sink(output, force)
        sink.check()
        _check_picture(picture, output, force)
        chosen = _chosen_format(output, format)
        parse_selection("layer", layer)
        parse_selection("head", head)
        of_corpus = {"text_column": text_column, "sample": sample}
        of_texts = {"a TEXT": text, "--file": file, "--ids": ids, "--image": image, "--audio": audio}
        corpus.check_options(data, of_corpus, of_texts)
        given = _given(data, text, file, ids, decoder_text, image, audio)
        with progress("loading the models and measuring …", quiet, debug):
            result = headscope.compare(
                model_a,
                model_b,
                **given,
                data=data,
                text_column=text_column or "text",
                sample=sample,
                tokenizer=tokenizer,
                layer=layer,
                head=head,
                stack=options.names(stack),
                rules=rules,
                metrics=metrics,
                engine=engine,
                words=words,
                exclude_special=exclude_special,
                max_length=max_length,
                strict_length=strict_length,
                batch_size=batch_size,
                seed=seed,
                revision=revision,
                revision_b=revision_b,
                device=device,
                dtype=dtype,
                device_map=device_map,
                trust_remote_code=trust_remote_code,
            )
        _tell(result, quiet)
        with together():
            _draw(result, picture, force)
            _write(result, chosen, sink)


def _chosen_format(output: Path | None, format: str | None) -> str:
    from headscope.views.records import format_for

    return format_for(output, format)


def _check_picture(picture: Path | None, output: Path | None, force: bool) -> None:
    if picture is None:
        return
    if picture.suffix.lower() not in PICTURES:
        raise InputError(f"--picture draws {', '.join(PICTURES)}, not {picture.name!r}", "name a file that ends so")
    check_target(picture, force)
    if output is not None and output.absolute() == picture.absolute():
        raise InputError(f"--output and --picture both name {output}", "name two files")


def _given(
    data: str | None,
    text: list[str] | None,
    file: Path | None,
    ids: list[str] | None,
    decoder_text: list[str] | None,
    image: list[Path] | None,
    audio: list[Path] | None,
) -> dict[str, Any]:
    if data is not None:
        one = corpus.decoder_text(decoder_text)
        return {"decoder_texts": None if one is None else [one]}
    if not (text or file or ids or image or audio):
        raise InputError(
            "nothing to compare on: there is no text",
            'headscope compare MODEL_A MODEL_B "some text", or --file, --data',
        )
    return inputs.given(text, file, ids, decoder_text, image, audio)


def _tell(result: Comparison, quiet: bool) -> None:
    """The header and the warnings, on standard error."""
    if not quiet:
        from headscope.views.comparison_summary import header_lines

        show(header_lines(result))
    for warning in result.warnings:
        say("warning", warning)


def _draw(result: Comparison, picture: Path | None, force: bool) -> None:
    if picture is not None:
        from headscope.views.comparison_figure import comparison_picture

        drawn = comparison_picture(result, file_format=picture.suffix[1:].lower())
        with replacing(picture, force) as file:
            file.write(drawn)


def _write(result: Comparison, chosen: str, sink: Sink) -> None:
    if chosen == "table" and sink.path is None:
        from headscope.views.comparison import comparison_table

        print_table(comparison_table(result))
        return
    from headscope.views.comparison import render_comparison

    sink.text(render_comparison(result, chosen))
