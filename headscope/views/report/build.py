"""Putting a page together: its static parts, its data, its scripts, and a policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from os import PathLike
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from headscope.errors import InputError, ResourceError, check_type, is_disk_full
from headscope.files import new_file
from headscope.files.links import own_place
from headscope.pruning.curve_result import Curve
from headscope.results import Analysis
from headscope.views.report.curve_file import losses_of
from headscope.views.report.data import embedded, page_data
from headscope.views.report.matrices import compact
from headscope.views.report.parts import (
    curve_part,
    facts_part,
    importance_part,
    made_part,
    types_part,
    warnings_part,
)
from headscope.views.report.plots import bokeh_script, plot_items
from headscope.views.text import html_text, visible

if TYPE_CHECKING:
    from headscope.importance.result import Importance

# The map and the head work before the library is read.
_SCRIPTS = ("page.js", "map.js", "head.js", "main.js")


@dataclass(frozen=True)
class Report:
    """A page. A notebook shows it in a frame of its own; `write` makes a file of it."""

    title: str
    html: str = field(repr=False)

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return len(self.html.encode("utf-8"))

    def write(self, path: str | PathLike[str], force: bool = False) -> None:
        """Write the page, whole or not at all.

        Raises:
            InputError: The file exists and `force` is not given, its name is a link, or it cannot be written.
            ResourceError: The disk is full.
        """
        target = own_place(Path(path))
        if target.exists() and not force:
            raise InputError(f"{target} exists", "give force=True to overwrite it, or another name")
        try:
            with new_file(target, force=force) as file:
                file.write(self.html.encode("utf-8"))
        except OSError as error:
            if is_disk_full(error):
                raise ResourceError(f"no space left for {target}", "free some, or write elsewhere") from error
            raise InputError(f"cannot write {target}: {error.strerror}", "name a file that you can write") from error

    def _repr_html_(self) -> str:
        style = "width:100%;height:90vh;border:0"
        frame = f'<iframe title="{html_text(self.title)}" sandbox="allow-scripts" style="{style}"'
        return f'{frame} srcdoc="{html.escape(self.html, quote=True)}"></iframe>'


def report(
    analysis: Analysis,
    path: str | PathLike[str] | None = None,
    *,
    importance: Importance | None = None,
    curve: Curve | str | PathLike[str] | None = None,
    command: str | None = None,
    force: bool = False,
) -> Report:
    """One self-contained page of an analysis: it loads nothing, and works from disk and in a notebook.

    Args:
        analysis: What to show. Its `maps` are the heads' pictures: analyze with `maps="pooled"`.
        path: Where to write the page, too.
        importance: Scores of the same model's heads, as `head_importance` gives them.
        curve: What removing heads costs, as `prune_curve` gives it, or the `.csv` that `headscope prune --curve` wrote.
        command: How the analysis was made, to be shown.
        force: Replace the file at `path`.

    Returns:
        The page; `.html` is its text.

    Raises:
        InputError: Bokeh is missing, the importance is of other heads, the curve cannot be read, or the file cannot be
            written.
    """
    bokeh = bokeh_script()
    check_type("analysis", analysis, Analysis, "what headscope.analyze returns")
    if importance is not None and not hasattr(importance, "kv_groups"):  # its class would bring torch along
        raise InputError(f"importance is a {type(importance).__name__}", "give what head_importance returns")
    check_type("curve", curve, (str, PathLike, Curve), "a file, or what prune_curve returns")
    losses = None if curve is None else losses_of(curve)
    matrices = compact(analysis.maps)
    data = embedded(page_data(analysis, matrices, importance, plot_items(losses)))
    script, plots = "\n".join(map(_asset, _SCRIPTS)), _asset("plots.js")
    title = f"Attention heads of {visible(analysis.model.name)}"
    page = Template(_asset("page.html")).substitute(
        policy=_policy([script, bokeh, plots]),
        title=html_text(title),
        model=html_text(analysis.model.name),
        style=_asset("page.css"),
        facts=facts_part(analysis),
        warnings=warnings_part([*analysis.warnings, *(() if importance is None else importance.warnings)]),
        importance=importance_part(analysis, importance),
        curve=curve_part(losses),
        types=types_part(analysis),
        made=made_part(analysis, matrices, command, len(data), len(bokeh)),
        data=data,
        bokeh=bokeh,
        script=script,
        plots=plots,
    )
    made = Report(title, page)
    if path is not None:
        made.write(path, force)
    return made


def _asset(name: str) -> str:
    return (resources.files("headscope.views.report") / name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """Scripts only if they are these, nothing from elsewhere. Bokeh makes style elements, which run nothing."""
    for script in scripts:
        if "</script" in script.lower() or "<!--" in script:
            raise ValueError("a script holds what would end its element")
    digests = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
