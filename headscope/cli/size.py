"""`headscope size`: what attention takes, from configurations alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import headscope
from headscope.cli import options
from headscope.cli.errors import reported
from headscope.cli.output import Sink, print_table
from headscope.cli.progress import progress

if TYPE_CHECKING:
    from headscope.sizing.result import Sizes

_NUMBERS = "A model by its numbers"

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL", help="Hub ids, directories or .gguf files; a row each, or one a stack.", show_default=False
    ),
]
HiddenSize = Annotated[
    int | None, typer.Option("--hidden-size", min=1, metavar="N", help="Width of a token's vector.",
                             rich_help_panel=_NUMBERS)
]  # fmt: skip
Heads = Annotated[
    int | None, typer.Option("--heads", min=1, metavar="N", help="Query heads a layer.", rich_help_panel=_NUMBERS)
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, metavar="N", help="Layers.", rich_help_panel=_NUMBERS)]
KvHeads = Annotated[
    int | None,
    typer.Option(
        "--kv-heads",
        min=1,
        metavar="N",
        help="Key-value heads a layer; as many as heads unless given.",
        rich_help_panel=_NUMBERS,
    ),
]
HeadDim = Annotated[
    int | None,
    typer.Option(
        "--head-dim", min=1, metavar="N", help="Width of a head; hidden size / heads.", rich_help_panel=_NUMBERS
    ),
]
IntermediateSize = Annotated[
    int | None,
    typer.Option(
        "--intermediate-size",
        min=1,
        metavar="N",
        help="Width of the feed-forward parts; with --vocab-size, to tell all parameters.",
        rich_help_panel=_NUMBERS,
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", min=1, metavar="N", help="Rows of the embedding.", rich_help_panel=_NUMBERS),
]
Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="What that row is called.", rich_help_panel=_NUMBERS)
]
Length = Annotated[
    int | None,
    typer.Option(
        "--length",
        min=1,
        metavar="N",
        help="Tokens; each model's limit unless given, 2,048 where it has none.",
        rich_help_panel="Measurement",
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, metavar="N", help="Sequences at once.", rich_help_panel="Measurement")
]
DType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="What matrices and cache are in; the config's unless given, else float32.",
        rich_help_panel="Measurement",
    ),
]


def size(
    models: Models = None,
    model: options.Model = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    hidden_size: HiddenSize = None,
    heads: Heads = None,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    intermediate_size: IntermediateSize = None,
    vocab_size: VocabSize = None,
    name: Name = None,
    length: Length = None,
    batch_size: BatchSize = 1,
    dtype: DType = None,
    format: options.Format = None,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Count parameters and bytes of attention and its KV cache, from configurations alone, without weights."""
    with reported(debug):
        sink = Sink(output, force)
        sink.check()
        chosen = _chosen_format(sink, format)
        with progress("reading configurations …", quiet, debug):
            result = headscope.size(
                [*(models or []), *([model] if model else [])] or None,
                hidden_size=hidden_size,
                num_heads=heads,
                num_layers=layers,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                intermediate_size=intermediate_size,
                vocab_size=vocab_size,
                name=name,
                length=length,
                dtype=dtype,
                batch_size=batch_size,
                revision=revision,
                trust_remote_code=trust_remote_code,
            )
        _write(result, chosen, sink)


def _chosen_format(sink: Sink, format: str | None) -> str:
    from headscope.views.records import format_for

    return format_for(sink.path, format)


def _write(result: Sizes, chosen: str, sink: Sink) -> None:
    from headscope.views.size import render_size, size_table

    if chosen == "table" and sink.path is None:
        print_table(size_table(result))
        return
    sink.text(render_size(result, chosen))
