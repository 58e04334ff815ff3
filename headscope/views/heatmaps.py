"""Pictures of an analysis, as bytes and as a directory of PNG files.

matplotlib is imported when the first picture is drawn, never by importing this module; no pyplot, no global state.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headscope.errors import HeadscopeError, InputError, ResourceError, is_disk_full
from headscope.files import new_directory, new_files
from headscope.files.links import own_place
from headscope.results import MOST_CELLS, Analysis, AttentionMap
from headscope.views.pooling import pooled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
_LONGEST_STACK_NAME = 80
# A side of more is beyond what is drawn, and the area of a quarter of it squared takes a gigabyte.
_MOST_PIXELS = 1 << 16
_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def head_picture(
    analysis: Analysis,
    attention: AttentionMap,
    head: int,
    *,
    largest: bool = False,
    file_format: str = "png",
    dpi: int = DPI,
) -> bytes:
    """One head's weights with token labels, as `png`, `svg` or `pdf`. Raises ValueError for a head not in the map.

    `largest` draws each tile's largest weight instead of its mean, where the map is pooled.
    """
    from headscope.views.attention_figures import head_figure

    return picture(lambda: head_figure(analysis, attention, head, largest), file_format, dpi)


def layer_picture(
    analysis: Analysis, attention: AttentionMap, *, largest: bool = False, file_format: str = "png", dpi: int = DPI
) -> bytes:
    """All heads of one layer in a grid, as `png`, `svg` or `pdf`; `largest` is the same as for one head."""
    from headscope.views.attention_figures import layer_figure

    return picture(lambda: layer_figure(analysis, attention, largest), file_format, dpi)


def model_picture(analysis: Analysis, metric: str | None = None, *, file_format: str = "png", dpi: int = DPI) -> bytes:
    """Every head's label and one metric beside it, as `png`, `svg` or `pdf`. Raises InputError: unknown metric."""
    from headscope.views.map_figure import map_figure

    return picture(lambda: map_figure(analysis, metric), file_format, dpi)


def picture(build: Callable[[], Figure], file_format: str, dpi: int) -> bytes:
    """A figure as `png`, `svg` or `pdf`, with our style and a box that takes in all of its text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from headscope.views.figure_base import figure_style

    out = io.BytesIO()
    with figure_style():
        figure = build()
        # Vector formats count 72 dots an inch; letters must be measured at the size at which they are drawn.
        figure.set_dpi(dpi if file_format == "png" else 72)
        if file_format == "png":
            _check_size(*(figure.get_size_inches() * dpi))
        # Asking for the box here and not with bbox_inches="tight" saves drawing everything twice.
        canvas = FigureCanvasAgg(figure)
        box = figure.get_tightbbox(canvas.get_renderer()).padded(0.06)  # type: ignore[no-untyped-call]  # their stubs
        if file_format == "png":
            _check_size(box.width * dpi, box.height * dpi)
        figure.savefig(out, format=file_format, dpi=dpi, bbox_inches=box, metadata=_UNDATED.get(file_format))
    return out.getvalue()


def _check_size(width: float, height: float) -> None:
    if max(width, height) >= _MOST_PIXELS or width * height >= _MOST_PIXELS**2 / 16:
        raise InputError(
            f"the picture would have {width:,.0f} × {height:,.0f} pixels", "lower the dpi, or draw an .svg or .pdf"
        )


def write_heatmaps(analysis: Analysis, directory: str | Path, force: bool = False) -> list[Path]:
    """Write `STACK.L5H3.png` for each head in the maps, `STACK.L5.png` for each layer, and `map.png`.

    Long texts are pooled: these pictures then show means over tiles, and `STACK.L5H3.max.png` and `STACK.L5.max.png`
    the largest weight of each tile.

    A directory that is not there yet appears with all of them in it. In one that is, they take their places when all
    are drawn, so that a failure leaves no picture and no part of one.

    Args:
        analysis: What to draw; `maps` holds the matrices, and an analysis without them gives `map.png` alone.
        directory: Where to write; made if missing.
        force: Replace files of these names.

    Returns:
        The files written, in the order in which they were drawn.

    Raises:
        InputError: A file exists already and `force` is not given, a name is a link, or the directory cannot be
            written.
        ResourceError: The disk is full.
    """
    target = Path(directory)
    drawings = dict(_drawings(analysis))
    for name in drawings:
        own_place(target / name)
    if not force:
        _refuse_existing(target, list(drawings))
    try:
        with _pictures_of(target, force) as folder:
            for name, draw in drawings.items():
                (folder / name).write_bytes(draw())
    except OSError as error:
        raise _plain_error(error, target) from error
    return [target / name for name in drawings]


def _pictures_of(target: Path, force: bool) -> AbstractContextManager[Path]:
    """Where pictures are written until all of them are."""
    if target.exists():
        return new_files(target, force=force)
    target.parent.mkdir(parents=True, exist_ok=True)
    return new_directory(own_place(target), force=False)


def _drawings(analysis: Analysis) -> Iterator[tuple[str, Callable[[], bytes]]]:
    names = file_stems([attention.stack for attention in analysis.maps])
    for attention in (pooled(found, MOST_CELLS) for found in analysis.maps if found.heads):
        stem = f"{names[attention.stack]}.L{attention.layer}"
        for largest in (False, True) if attention.tile > 1 else (False,):
            end = ".max.png" if largest else ".png"
            for head in attention.heads:
                yield f"{stem}H{head}{end}", partial(head_picture, analysis, attention, head, largest=largest)
            yield f"{stem}{end}", partial(layer_picture, analysis, attention, largest=largest)
    yield "map.png", partial(model_picture, analysis)


def file_stems(stacks: list[str]) -> dict[str, str]:
    """A file name's first part for each stack: letters, digits, `.`, `-` and `_` only, no two alike."""
    stems: dict[str, str] = {}
    for stack in dict.fromkeys(stacks):
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", stack)[-_LONGEST_STACK_NAME:].strip(".") or "stack"
        candidate, number = stem, 1
        while candidate.lower() in {taken.lower() for taken in stems.values()}:
            number += 1
            candidate = f"{stem}-{number}"
        stems[stack] = candidate
    return stems


def _refuse_existing(target: Path, names: list[str]) -> None:
    found = [name for name in names if os.path.lexists(target / name)]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise InputError(
            f"{str(target / found[0])!r}{more} exists already", hint="give --force to replace, or another directory"
        )


def _plain_error(error: OSError, target: Path) -> HeadscopeError:
    if is_disk_full(error):
        return ResourceError(f"no space left for the pictures in {str(target)!r}", hint="free some, or write elsewhere")
    reason = error.strerror or str(error)
    return InputError(f"cannot write pictures to {str(target)!r}: {reason}", hint="name a directory you can write to")
