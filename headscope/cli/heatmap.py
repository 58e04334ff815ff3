"""`headscope heatmap`: one picture of attention, as PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import headscope
from headscope.cli import analyze, inputs, options, text_options
from headscope.cli.errors import reported, say
from headscope.cli.guided import PICTURES
from headscope.cli.output import check_target, replacing
from headscope.cli.progress import progress
from headscope.errors import InputError
from headscope.models.selection import parse_selection

if TYPE_CHECKING:
    from headscope.heads.pictures import Maps

_PICTURE = "Picture"

Kind = Annotated[
    Literal["heads", "mean", "rollout", "map", "similarity"] | None,
    typer.Option(
        "--kind",
        help="Heads (one large, or a grid), each layer's mean over its heads, attention rollout over layers, the map "
        "of the model, or how alike its heads are. Default: heads where a layer or head is named, else the map.",
        rich_help_panel=_PICTURE,
        show_default=False,
    ),
]
Query = Annotated[
    int | None,
    typer.Option(
        "--query",
        metavar="N",
        help="Over an image: the token that looks, from 0; the class token unless given, else the mean of all.",
        rich_help_panel=_PICTURE,
    ),
]
Matrix = Annotated[
    bool, typer.Option("--matrix", help="Plain matrices of images and sounds too.", rich_help_panel=_PICTURE)
]
Metric = Annotated[
    str | None, typer.Option("--metric", metavar="NAME", help="What the map shows.", rich_help_panel=_PICTURE)
]
Dpi = Annotated[int, typer.Option("--dpi", metavar="N", help="Dots an inch.", rich_help_panel=_PICTURE)]
Cmap = Annotated[
    str, typer.Option("--cmap", metavar="NAME", help="Colour map of matplotlib.", rich_help_panel=_PICTURE)
]
Vmax = Annotated[
    float | None,
    typer.Option(
        "--vmax", metavar="W", help="Value of the last colour; each matrix's largest.", rich_help_panel=_PICTURE
    ),
]
Title = Annotated[
    str | None, typer.Option("--title", metavar="TEXT", help="In place of ours.", rich_help_panel=_PICTURE)
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="The picture: .png, .svg or .pdf. Required.", rich_help_panel="Output"
    ),
]


def heatmap(
    text: options.Texts = None,
    file: options.TextFile = None,
    ids: options.Ids = None,
    tokenizer: options.Tokenizer = None,
    decoder_text: options.DecoderTexts = None,
    image: options.Images = None,
    audio: options.Sounds = None,
    max_length: options.MaxLength = None,
    strict_length: options.StrictLength = False,
    generate: text_options.Generate = None,
    chat: text_options.Chat = False,
    pair: text_options.Pair = None,
    pre_split: text_options.PreSplit = False,
    model: options.Model = None,
    revision: options.Revision = None,
    layer: options.Layer = "all",
    head: options.Head = "all",
    stack: options.Stacks = None,
    device: options.Device = "auto",
    dtype: options.DType = None,
    device_map: options.DeviceMap = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    rules: analyze.Rules = "seed",
    engine: analyze.Engine = "auto",
    words: analyze.Words = False,
    exclude_special: analyze.ExcludeSpecial = False,
    kind: Kind = None,
    metric: Metric = None,
    query: Query = None,
    matrix: Matrix = False,
    dpi: Dpi = 150,
    cmap: Cmap = "cividis",
    vmax: Vmax = None,
    title: Title = None,
    output: Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Draw attention: a head, a layer, means, rollout or the whole model, over images and sounds too."""
    with reported(debug):
        target = _target(output, force)
        chosen = kind or ("map" if layer == head == "all" else "heads")
        _check_picture(chosen, target, dpi, cmap, vmax, metric, query)
        parse_selection("layer", layer)
        parse_selection("head", head)
        found = inputs.given(text, file, ids, decoder_text, image, audio)
        _check_one(found)
        form = text_options.arguments(generate, chat, pair, pre_split, found)
        stacks = options.names(stack)
        with progress("loading the model and drawing …", quiet, debug):
            analyze.seed_everything(seed)
            analysis = headscope.analyze(
                model,
                **found,
                **form,
                tokenizer=tokenizer,
                layer=layer,
                head=head,
                stack=stacks,
                rules=rules,
                metrics="core" if metric is None else metric,
                engine=engine,
                max_length=max_length,
                strict_length=strict_length,
                words=words,
                exclude_special=exclude_special,
                types="redundant" if chosen == "similarity" else None,
                maps=_maps(chosen, whole=bool(image or audio) or stacks == ["cross"]),
                seed=seed,
                revision=revision,
                device=device,
                dtype=dtype,
                device_map=device_map,
                trust_remote_code=trust_remote_code,
            )
            drawn = headscope.heatmap(
                analysis,
                chosen,
                metric=metric,
                query=query,
                matrix=matrix,
                file_format=target.suffix[1:].lower(),
                dpi=dpi,
                cmap=cmap,
                vmax=vmax,
                title=title,
            )
        for warning in analysis.warnings:
            say("warning", warning)
        with replacing(target, force) as opened:
            opened.write(drawn)


def _target(output: Path | None, force: bool) -> Path:
    """Where the picture goes, checked."""
    if output is None:
        raise InputError("heatmap writes a file, and none is named", "add -o picture.png (or .svg, .pdf)")
    if output.suffix.lower() not in PICTURES:
        raise InputError(f"--output draws {', '.join(PICTURES)}, not {output.name!r}", "name a file that ends so")
    check_target(output, force)
    return output


def _check_picture(
    kind: str, target: Path, dpi: int, cmap: str, vmax: float | None, metric: str | None, query: int | None
) -> None:
    from headscope.views.heatmap import check_arguments

    check_arguments(kind, target.suffix[1:].lower(), dpi, cmap, vmax)
    if metric is not None and kind != "map":
        raise InputError(f"--metric is for --kind map, not {kind}", "leave it out, or draw the map")
    if vmax is not None and kind == "similarity":
        raise InputError("--vmax is for weights, and similarity draws distances from 0 to 1", "leave it out")
    if query is not None and kind in ("map", "similarity"):
        raise InputError("--query is for attention over an image", "leave it out")


def _check_one(found: dict[str, Any]) -> None:
    """A picture is of one input: refuse several, rather than draw the first and keep quiet about the others."""
    for name, given in found.items():
        if given is not None and len(given) > 1:
            raise InputError(f"heatmap draws one input, not {len(given)} ({name})", "run it once for each")


def _maps(kind: str, whole: bool) -> Maps:
    """What the picture needs of the matrices: patches of images and a decoder's few rows cannot be pooled."""
    if kind in ("map", "similarity"):
        return False
    return "mean" if kind == "rollout" or (kind == "mean" and whole) else whole or "pooled"
