"""`headscope prune --curve`: what removing heads costs, as a picture, the numbers beside it, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headscope
from headscope.cli.errors import say
from headscope.cli.output import Sink, check_target, print_table, replacing
from headscope.cli.progress import progress, show
from headscope.files import together

if TYPE_CHECKING:
    from headscope.pruning.curve_result import Curve


def draw_curve(
    model: str | None,
    picture: Path,
    methods: Sequence[str] | None,
    unit: str | None,
    shared: Mapping[str, Any],
    chosen: str,
    force: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Measure a curve and write it in all of its forms.

    Args:
        picture: The file to draw; its numbers go to a file of the same name that ends with `.csv`.
        methods, unit: None for the defaults.
        shared: Arguments that `prune_curve` has in common with `prune`. Without texts of its own, a repair takes a part
            of `data`.
        chosen: The format for standard output.
    """
    for path in (picture, numbers_of(picture)):
        check_target(path, force)
    ways = dict(shared) | {"repair": shared["repair"] or True, "unit": unit or "head"}
    if methods is not None:
        ways["methods"] = methods
    with progress("loading the model and measuring …", quiet, debug):
        curve = headscope.prune_curve(model, **ways)
    _tell(curve, quiet)
    _write_files(curve, picture, force)
    _write(curve, chosen)


def numbers_of(picture: Path) -> Path:
    """Where a picture's numbers go."""
    return picture.with_suffix(".csv")


def _tell(curve: Curve, quiet: bool) -> None:
    if not quiet:
        from headscope.views.curve import header_lines

        show(header_lines(curve))
    for warning in curve.warnings:
        say("warning", warning)


def _write_files(curve: Curve, picture: Path, force: bool) -> None:
    from headscope.views.curve import curve_csv, curve_picture

    drawn = curve_picture(curve, file_format=picture.suffix[1:].lower())
    with together():
        with replacing(picture, force) as file:
            file.write(drawn)
        Sink(numbers_of(picture), force).text(curve_csv(curve))


def _write(curve: Curve, chosen: str) -> None:
    from headscope.views.curve import curve_table, render_curve

    if chosen == "table":
        print_table(curve_table(curve))
        return
    Sink(None).text(render_curve(curve, chosen))
