"""Scores as a file, and back to a model's heads."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.capture.outputs import Output
from headscope.errors import InputError
from headscope.importance.method import LayerScores
from headscope.importance.result import IMPORTANCE_SCHEMA, GroupScore, HeadScore, LayerCurve
from headscope.importance.result import Importance as Importance
from headscope.importance.result import importance_result as importance_result
from headscope.reading.whole import read_whole
from headscope.results import ModelInfo, Stack

_HINT = "score the heads of this model with `headscope importance`"
_DAMAGED = "give a file that `headscope importance -f json` wrote"


# ------------------------------------------------------------------ from a file
def read_scores(path: str | Path) -> Importance:
    """Read what `headscope importance -f json` wrote. Schema, method and heads must be there, the rest may be missing.

    Raises:
        InputError: The file cannot be read, is not JSON, has another schema, a number that is not finite, something
            else than it should have, or a unit twice; the message names the place in the file.
    """
    path = Path(path)
    found = _Record(_json(path), str(path))
    schema = found.text("schema", "")
    if schema != IMPORTANCE_SCHEMA:
        raise InputError(f"{path} has the schema {reprlib.repr(schema)}, not {IMPORTANCE_SCHEMA}", _DAMAGED)
    heads = tuple(_head(r) for r in found.records("heads", required=True))
    groups = tuple(_group(r) for r in found.records("kv_groups"))
    curves = tuple(_curve(r) for r in found.records("curves"))
    _check_once("head", [(h.stack, h.layer, h.head) for h in heads], path)
    _check_once("kv-group", [(g.stack, g.layer, g.kv_group) for g in groups], path)
    _check_once("curve", [(c.stack, c.layer, c.unit) for c in curves], path)
    return Importance(
        _model(found.record("model")),
        found.text("method"),
        found.text("replace", "zero"),
        found.take("normalised", lambda v: isinstance(v, bool), "true or false", False),
        found.take("loss", lambda v: v is None or _is_text(v), "a text or null"),
        heads,
        groups,
        curves,
        found.whole("texts", 0),
        found.whole("tokens", 0),
        found.whole("seed", 0),
        found.items("warnings", _is_text, "texts", ()),
        found.take("versions", _are_versions, "texts by name", {}),
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(read_whole(path).decode("utf-8-sig"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", _DAMAGED) from error


def _refuse(constant: str) -> None:
    raise ValueError(f"it has the number {constant}")


@dataclass(frozen=True)
class _Record:
    """An object in a file, and where it is there."""

    values: Any
    where: str

    def take(self, name: str, fits: Callable[[Any], bool], what: str, default: Any = None) -> Any:
        """A value that must fit, or the default, unless that is None, where there is none."""
        if not isinstance(self.values, Mapping):
            raise InputError(f"{self.where} is {reprlib.repr(self.values)}, not an object", _DAMAGED)
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not fits(value):
            raise InputError(f"{self.where}: {name} is {reprlib.repr(value)}, not {what}", _DAMAGED)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        return str(self.take(name, _is_text, "a text", default))

    def whole(self, name: str, default: int | None = None) -> int:
        return int(self.take(name, _is_whole, "a whole number from 0", default))

    def optional(self, name: str) -> int | None:
        found: int | None = self.take(name, lambda v: v is None or _is_whole(v), "a whole number from 0, or null")
        return found

    def number(self, name: str) -> float:
        return float(self.take(name, _is_number, "a finite number"))

    def items(self, name: str, fits: Callable[[Any], bool], what: str, default: Any = None) -> tuple[Any, ...]:
        return tuple(self.take(name, lambda v: isinstance(v, list) and all(map(fits, v)), f"a list of {what}", default))

    def record(self, name: str) -> _Record:
        return _Record(self.take(name, lambda v: isinstance(v, Mapping), "an object", {}), f"{self.where}: {name}")

    def records(self, name: str, *, required: bool = False) -> list[_Record]:
        found = self.items(name, lambda v: isinstance(v, Mapping), "objects", None if required else ())
        return [_Record(v, f"{self.where}: {name}[{i}]") for i, v in enumerate(found)]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _are_versions(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value.values()))


def _head(found: _Record) -> HeadScore:
    return HeadScore(
        found.text("stack"), found.whole("layer"), found.whole("head"), found.number("score"), _error(found)
    )


def _group(found: _Record) -> GroupScore:
    heads = found.items("heads", _is_whole, "heads")
    number = found.whole("kv_group")
    return GroupScore(found.text("stack"), found.whole("layer"), number, heads, found.number("score"), _error(found))


def _error(found: _Record) -> float | None:
    error = found.take("error", lambda v: v is None or _is_number(v), "a finite number or null")
    return None if error is None else float(error)


def _curve(found: _Record) -> LayerCurve:
    unit = found.take("unit", lambda v: v in ("head", "kv-group"), "head or kv-group")
    order = found.items("order", _is_whole, "units")
    losses = tuple(float(v) for v in found.items("losses", _is_number, "finite numbers"))
    if len(set(order)) < len(order) or len(losses) != len(order) + 1 or losses[0]:
        raise InputError(f"{found.where} does not have each unit once and a loss for 0, 1, … of them", _DAMAGED)
    return LayerCurve(found.text("stack"), found.whole("layer"), unit, order, losses)


def _model(found: _Record) -> ModelInfo:
    stacks = tuple(
        Stack(r.text("name"), r.items("layers", _is_whole, "layers"), r.items("num_heads", _is_whole, "numbers"))
        for r in found.records("stacks")
    )
    name, kind, class_name, dtype, device = (found.text(n, "") for n in ("name", "type", "class", "dtype", "device"))
    sizes = {n: found.optional(n) for n in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")}
    return ModelInfo(name, kind, class_name, dtype, device, **sizes, stacks=stacks)


def _check_once(what: str, places: Collection[Hashable], path: Path) -> None:
    seen: set[Hashable] = set()
    for place in places:
        if place in seen:
            raise InputError(f"{path} has the {what} {place} twice", _DAMAGED)
        seen.add(place)


# ------------------------------------------------------------------ back to a model
def scored_from(importance: Importance, outputs: Sequence[Output], unit: str) -> dict[str, LayerScores]:
    """The scores of a model's units by `Output.name`.

    Units that are gone from the model by now are passed over; then a curve has what each unit that is left added to it
    when it was drawn, which is exact if those that are gone came first. Layers that share a module have the scores of
    the first.

    Args:
        unit: `head` or `kv-group`.

    Raises:
        InputError: The scores are not those of this model's heads, or there are none for these units.
    """
    found: Sequence[HeadScore | GroupScore] = importance.heads if unit == "head" else importance.kv_groups
    if not found:
        raise InputError(f"there are no scores of {unit}s", _HINT)
    _check_layers(found, outputs)
    scored: dict[str, LayerScores] = {}
    for output in outputs:
        place = (output.sites[0].stack, output.sites[0].layer)
        own = {s.number: s for s in found if (s.stack, s.layer) == place}
        _check_units(output, own, unit)
        numbers = [u.number for u in output.units(unit)]
        errors = [own[n].error for n in numbers]
        curve = next((c for c in importance.curves if (c.stack, c.layer, c.unit) == (*place, unit)), None)
        scored[output.name] = LayerScores(
            np.array([own[n].score for n in numbers], dtype=np.float64),
            None if None in errors else np.array(errors, dtype=np.float64),
            *((None, None) if curve is None else _fitted(output, curve, numbers)),
        )
    return scored


def _check_layers(found: Sequence[HeadScore | GroupScore], outputs: Sequence[Output]) -> None:
    """Stacks of which no layer is looked at may have been left out by choice; layers of the others may not."""
    known = {(s.stack, s.layer) for o in outputs for s in o.sites}
    stacks = {stack for stack, _ in known}
    other = next((s for s in found if s.stack in stacks and (s.stack, s.layer) not in known), None)
    if other is not None:
        raise InputError(f"the scores have a layer {other.stack}.{other.layer}, which the model does not have", _HINT)


def _check_units(output: Output, own: Mapping[int, HeadScore | GroupScore], unit: str) -> None:
    total = output.state.num_heads if unit == "head" else output.state.num_kv_heads
    unknown = sorted(n for n in own if n >= total)
    if unknown:
        raise InputError(f"the scores have {unit} {unknown[0]} of {output.name}, where there are {total}", _HINT)
    for wanted in output.units(unit):
        found = own.get(wanted.number)
        if found is None:
            raise InputError(f"the scores lack {unit} {wanted.number} of {output.name}", _HINT)
        if isinstance(found, GroupScore) and not set(wanted.heads) <= set(found.heads):
            raise InputError(f"the scores have other heads in {unit} {wanted.number} of {output.name}", _HINT)


def _fitted(output: Output, curve: LayerCurve, numbers: Sequence[int]) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    """Order and losses of the units that are left."""
    if not set(numbers) <= set(curve.order):
        raise InputError(f"the curve of {output.name} does not have all of its {curve.unit}s", _HINT)
    left = [k for k, number in enumerate(curve.order) if number in numbers]
    losses = np.array(curve.losses)
    if len(left) < len(curve.order):
        losses = np.concatenate([[0.0], np.diff(losses)[left].cumsum()])
    return tuple(numbers.index(curve.order[k]) for k in left), losses
