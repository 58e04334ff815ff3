"""Metrics and rule sets of other distributions, found through their entry points.

A distribution names them in its `pyproject.toml`:

    [project.entry-points."headscope.metrics"]
    two_back = "my_heads:two_back"

    [project.entry-points."headscope.rules"]
    mine = "my_heads:mine"

A metric is a function under `headscope.heads.metrics.metric` or `target_metric`, and its entry point has the function's
name. It is called with real rows of attention and, for chance, with even ones, so it takes everything, sizes too, from
the `headscope.capture.blocks.Rows` that it is given. Rules are TOML text, a file of it (a path, or what
`importlib.resources.files` gives), or a function that returns one of these.

    from importlib.resources import files

    from headscope.heads.metrics import Target, target_metric

    @target_metric()
    def two_back() -> Target:
        return Target(offset=-2)

    mine = files("my_heads") / "mine.toml"

Names come from metadata alone: nothing of a distribution is imported, nor torch, until one of its names is asked for.
headscope's own names win, and of two distributions with one name the first in alphabetical order, so that it is the
same one on every machine.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, resources
from typing import Any

from headscope.errors import InputError

METRICS, RULES = "headscope.metrics", "headscope.rules"
OWN_RULES = ("seed", "calibrated")
# What `--metrics` takes and what is no metric.
GROUPS_OF_METRICS = ("core", "all")
_KIND = {METRICS: "metric", RULES: "rule set"}


@dataclass(frozen=True)
class Plugin:
    """A name that a distribution offers."""

    group: str
    name: str
    distribution: str
    version: str
    entry: metadata.EntryPoint

    def __str__(self) -> str:
        return f"the {_KIND[self.group]} {self.name!r} of the distribution {self.distribution!r}"

    def load(self) -> Any:
        """What the entry point names.

        Raises:
            InputError: It cannot be imported.
        """
        try:
            return self.entry.load()
        except (Exception, SystemExit) as error:  # whatever another's module does as it is imported
            raise self.broken(error) from error

    def broken(self, error: BaseException) -> InputError:
        """What the user is told of an error in it."""
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        reason = f"{type(error).__name__}: {first}".removesuffix(": ")
        return InputError(f"{self} cannot be loaded: {reason}", f"Update or uninstall {self.distribution}.")


@dataclass(frozen=True)
class Installed:
    """What all distributions offer in one group.

    Attributes:
        plugins: By name, in alphabetical order.
        left_out: Names that are not taken, and why.
    """

    plugins: Mapping[str, Plugin]
    left_out: tuple[tuple[str, str], ...]


def installed(group: str) -> Installed:
    """The plugins of a group, `METRICS` or `RULES`."""
    return _read(group, tuple(sys.path))


def warnings(group: str, names: Iterable[str] | None = None) -> tuple[str, ...]:
    """A line for each plugin that is not taken, of all names or of some."""
    wanted = None if names is None else set(names)
    return tuple(text for name, text in installed(group).left_out if wanted is None or name in wanted)


def listing(group: str) -> str:
    """`name (distribution), …`; empty where there is nothing."""
    return ", ".join(f"{p.name} ({p.distribution})" for p in installed(group).plugins.values())


def help_text(group: str) -> str:
    """The sentence of `--help` about what is installed; empty where nothing is."""
    found = listing(group)
    return f" Installed: {found}." if found else ""


@lru_cache(maxsize=8)
def _read(group: str, path: tuple[str, ...]) -> Installed:
    """What is installed on a path."""
    offered = sorted((_plugin(group, e) for e in metadata.entry_points(group=group)), key=_order)
    own = _own(group) if offered else ()
    plugins: dict[str, Plugin] = {}
    left_out = []
    for one in offered:
        if one.name in own:
            left_out.append((one.name, f"{one} is not used: headscope has its own"))
        elif not _allowed(one):
            left_out.append((one.name, f"{one} is not used: that name cannot be asked for"))
        elif one.name in plugins:
            first = plugins[one.name].distribution
            left_out.append((one.name, f"{one} is not used: the distribution {first!r} comes first"))
        else:
            plugins[one.name] = one
    return Installed(plugins, tuple(left_out))


def _plugin(group: str, entry: metadata.EntryPoint) -> Plugin:
    distribution = entry.dist
    name, version = (distribution.name, distribution.version) if distribution is not None else ("", "")
    return Plugin(group, entry.name, name or "unknown", version or "unknown", entry)


def _order(plugin: Plugin) -> tuple[str, str, str]:
    return plugin.name, plugin.distribution.lower(), plugin.entry.value


def _own(group: str) -> tuple[str, ...]:
    """headscope's names; those of metrics from the source of their module, which would import torch."""
    if group == RULES:
        return OWN_RULES
    source = (resources.files("headscope.heads") / "metrics.py").read_text(encoding="utf-8")
    functions = [f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.decorator_list]
    return (*GROUPS_OF_METRICS, *(f.name for f in functions))


def _allowed(plugin: Plugin) -> bool:
    if plugin.group == METRICS:
        return metric_name_allowed(plugin.name)
    return re.fullmatch(r"[\w.-]+", plugin.name) is not None and not plugin.name.endswith(".toml")


def metric_name_allowed(name: str) -> bool:
    """Whether a metric may have this name: the names of variants and groups could not be told from it."""
    return (
        name.isidentifier() and name not in GROUPS_OF_METRICS and not name.endswith("_rest") and "_adjusted" not in name
    )
