"""A request checked against a model: what leaves each attention module, before anything is touched."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from headscope.errors import InputError, ModelError
from headscope.models.projections import Projections, arrangement_runs, projections, state_of
from headscope.models.pruned import HeadState, pruned_state
from headscope.models.sites import Site, find_sites
from headscope.pruning.groups import Groups
from headscope.pruning.spec import Request, parse_heads, write_heads

Heads = str | Sequence[str] | Mapping[Any, Iterable[int]]
"""What a user may write: `--heads` texts, or {layer: heads} with layers as numbers or as `stack.layer`."""


@dataclass(frozen=True)
class ModulePlan:
    """What happens to one attention module.

    Attributes:
        sites: The layers that it serves; several share a module in ALBERT.
        found: Its projections as they are now.
        before, after: Its heads as they are now, and as they shall be.
    """

    sites: tuple[Site, ...]
    found: Projections
    before: HeadState
    after: HeadState

    @property
    def names(self) -> tuple[str, ...]:
        """`self.5` for each layer."""
        return tuple(f"{s.stack}.{s.layer}" for s in self.sites)


@dataclass(frozen=True)
class Plan:
    """A checked request.

    Attributes:
        modules: Those that change.
        heads: All heads that give nothing afterwards, by `stack.layer`, in original numbers, earlier prunings included.
        zeroed: Those of them that stay in the weights, zeroed.
        original: Query and key-value heads of the original model, by `stack.layer`, for the same layers.
        notes: One line each: heads that were gone already, layers that share a module, placeholders.
    """

    modules: tuple[ModulePlan, ...]
    heads: Mapping[str, tuple[int, ...]]
    zeroed: Mapping[str, tuple[int, ...]]
    original: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...] = ()


def make_plan(
    model: PreTrainedModel, heads: Heads, *, allow_empty: bool = False, ragged: str = "refuse", zero_all: bool = False
) -> Plan:
    """Check which heads shall leave. The model is only read; weights need no values (the meta device).

    Args:
        model: Pruned before or not.
        heads: In the numbers of the original model.
        allow_empty: Where a layer loses all heads, keep one, zeroed, so that caches keep their length; refused else.
        ragged: `refuse` plans after which key-value heads have unequally many query heads, or `mask`: then what can
            leave does, and the rest is zeroed in place.
        zero_all: Zero all heads in place; then every plan is legal.

    Raises:
        InputError: A layer or head does not exist, a layer is emptied, or groups become uneven.
        NotPlain, ModelError: A module has no heads that can be told apart.
    """
    if ragged not in ("refuse", "mask"):
        raise InputError(f"ragged is {ragged!r}", "It is 'refuse' or 'mask'.")
    sites = find_sites(model)
    wanted, notes = _wanted(model, sites, heads)
    modules = []
    for group in _by_module(sites):
        asked: set[int] = set().union(*(wanted.get(s, set()) for s in group))
        if asked:
            modules.append(_module_plan(model, group, asked, _Ways(allow_empty, ragged, zero_all), notes))
    return _plan(sites, [m for m in modules if m.after != m.before], notes)


def current_plan(model: PreTrainedModel) -> Plan:
    """What was removed from a model up to now, as a plan that changes nothing."""
    return _plan(find_sites(model), [], [])


# ------------------------------------------------------------------ what is asked for
def _wanted(model: PreTrainedModel, sites: Sequence[Site], heads: Heads) -> tuple[dict[Site, set[int]], list[str]]:
    valid = _Valid(model, sites)
    requests = _requests(heads, valid)
    wanted: dict[Site, set[int]] = {}
    notes: list[str] = []
    for request in requests:
        site = valid.site(request)
        asked = valid.heads(site, request)
        once = wanted.setdefault(site, set())
        twice = sorted({h for h in asked if h in once or asked.count(h) > 1})
        if twice:
            notes.append(f"{_name(site)}: head {write_heads(twice)} is named more than once and taken once")
        once |= set(asked)
    return wanted, notes


def _requests(heads: Heads, valid: _Valid) -> tuple[Request, ...]:
    if isinstance(heads, Mapping):
        return tuple(_from_pair(key, values, valid) for key, values in heads.items())
    return parse_heads(heads, valid.everything())


def _from_pair(key: Any, values: Iterable[int], valid: _Valid) -> Request:
    stack, _, layer = str(key).strip().rpartition(".")
    if isinstance(key, bool) or not re.fullmatch(r"-?[0-9]{1,9}", layer):
        raise InputError(f"cannot read the layer {reprlib.repr(key)}", f"Write 5 or 'self.5'. {valid.everything()}")
    numbers = [values] if isinstance(values, int) else list(values)
    if not numbers:
        raise InputError(f"no heads are given for layer {key}", valid.everything())
    for n in numbers:
        if isinstance(n, bool) or not hasattr(n, "__index__"):
            raise InputError(f"cannot read the head {reprlib.repr(n)} of layer {key}", valid.everything())
    return Request(stack or None, int(layer), tuple((int(n), int(n)) for n in numbers))


class _Valid:
    """The layers and heads that a model has, to find what requests name and to tell what they could have named."""

    def __init__(self, model: PreTrainedModel, sites: Sequence[Site]) -> None:
        self.model, self.sites = model, sites
        self.stacks = list(dict.fromkeys(s.stack for s in sites))

    def everything(self) -> str:
        """`Valid: layers 0-11, heads 0-11.`, for each stack."""
        parts = []
        for stack in self.stacks:
            prefix = "" if len(self.stacks) == 1 else f"{stack}: "
            counts = {self._count(s) for s in self.sites if s.stack == stack} - {None}
            heads = f", heads 0-{max(c for c in counts if c) - 1}" if len(counts) == 1 else ""
            parts.append(f"{prefix}layers {self._layers(stack)}{heads}")
        return f"Valid: {'; '.join(parts)}."

    def _count(self, site: Site) -> int | None:
        try:
            return state_of(site, projections(site)).num_heads
        except ModelError:
            return None

    def site(self, request: Request) -> Site:
        stack = request.stack
        if stack is None and len(self.stacks) > 1:
            raise InputError(
                f"layer {request.layer} could be in any of the stacks {', '.join(self.stacks)}",
                f"Write for example {self.stacks[0]}.{request.layer}:0. {self.everything()}",
            )
        if stack is not None and stack not in self.stacks:
            raise InputError(f"stack {reprlib.repr(stack)} does not exist in this model", self.everything())
        stack = stack or self.stacks[0]
        found = [s for s in self.sites if (s.stack, s.layer) == (stack, request.layer)]
        if not found:
            where = "this model" if len(self.stacks) == 1 else stack
            raise InputError(
                f"layer {request.layer} does not exist in {where}: its layers are {self._layers(stack)}",
                self.everything(),
            )
        return found[0]

    def heads(self, site: Site, request: Request) -> list[int]:
        count = state_of(site, projections(site, model=self.model)).num_heads
        ranges = ((0, count - 1),) if request.heads is None else request.heads
        for low, high in ranges:
            if low < 0 or high >= count:
                bad = low if low < 0 else high
                raise InputError(
                    f"head {bad} does not exist in layer {site.layer} of {site.stack}: its heads are 0-{count - 1}",
                    "Heads are counted from 0 and keep the numbers that they have in the original model.",
                )
        return [h for low, high in ranges for h in range(low, high + 1)]

    def _layers(self, stack: str) -> str:
        return write_heads([s.layer for s in self.sites if s.stack == stack])


# ------------------------------------------------------------------ what can be done
@dataclass(frozen=True)
class _Ways:
    """How heads may go, as `make_plan` is told."""

    allow_empty: bool
    ragged: str
    zero_all: bool


def _module_plan(
    model: PreTrainedModel, sites: tuple[Site, ...], asked: set[int], ways: _Ways, notes: list[str]
) -> ModulePlan:
    site = sites[0]
    found = projections(site, model=model)
    before = state_of(site, found)
    name = " and ".join(_name(s) for s in sites)
    again = asked & set(before.gone)
    if again:
        notes.append(f"{name}: head {write_heads(sorted(again))} was removed already")
    if len(sites) > 1:
        notes.append(f"{name} share one module: head {write_heads(sorted(asked))} leaves all of them")
    gone = asked | set(before.gone)
    zeroed = _staying(site, found, before, gone, ways, notes) if asked - again else before.zeroed
    removed = tuple(sorted(gone - set(zeroed)))
    return ModulePlan(sites, found, before, replace(before, removed=removed, zeroed=zeroed))


def _staying(
    site: Site,
    found: Projections,
    before: HeadState,
    gone: set[int],
    ways: _Ways,
    notes: list[str],
) -> tuple[int, ...]:
    """The heads that shall give nothing but have to stay in the weights, zeroed."""
    if ways.zero_all:
        return tuple(sorted(gone - set(before.removed)))
    groups = _groups(site, found, before)
    if len(gone) == before.num_heads:
        if not ways.allow_empty:
            raise InputError(
                f"{_name(site)} would lose all of its {before.num_heads} heads",
                f"Keep one of 0-{before.num_heads - 1}, or allow empty layers (--allow-empty): one head then stays, "
                "zeroed.",
            )
        stay = groups.placeholder(before.kept)
        notes.append(f"{_name(site)} loses all heads: head {write_heads(stay)} stays as a placeholder, zeroed")
        return stay
    if groups.legal(gone):
        return ()
    if ways.ragged == "refuse":
        raise _uneven(site, groups, gone)
    stay = groups.fillers(gone, before.kept)
    notes.append(
        f"{_name(site)}: head {write_heads(stay)} cannot leave without making groups uneven; it is zeroed in place, "
        "which saves no parameters"
    )
    return stay


def _groups(site: Site, found: Projections, state: HeadState) -> Groups:
    """Groups by key-value heads, or by the runs of a fused weight, where code counts on their number."""
    runs = arrangement_runs(site, found)
    if runs is not None:
        return Groups(state.num_heads, state.num_heads // runs, fixed=True)
    return Groups(state.num_heads, state.group)


def _uneven(site: Site, groups: Groups, gone: set[int]) -> InputError:
    left = groups.left(gone)
    plans = [f"{site.stack}.{site.layer}:{write_heads(heads)} ({what})" for heads, what in groups.nearest(gone)]
    kind = "runs of its fused weight" if groups.fixed else "key-value heads"
    return InputError(
        f"without head {write_heads(sorted(gone))} of {_name(site)} its {kind} would have unequally many query heads: "
        f"{', '.join(map(str, left))}",
        f"Nearest legal: {'; '.join(plans)}; or zero them in place (--ragged mask).",
    )


# ------------------------------------------------------------------ putting together
def _plan(sites: Sequence[Site], modules: list[ModulePlan], notes: list[str]) -> Plan:
    heads: dict[str, tuple[int, ...]] = {}
    zeroed: dict[str, tuple[int, ...]] = {}
    original: dict[str, tuple[int, int]] = {}
    after = {id(m.sites[0].module): m.after for m in modules}
    for site in sites:
        state = after.get(id(site.module)) or pruned_state(site.module)
        if state is None or not state.gone:
            continue
        name = f"{site.stack}.{site.layer}"
        heads[name], original[name] = state.gone, (state.num_heads, state.num_kv_heads)
        if state.zeroed:
            zeroed[name] = state.zeroed
    return Plan(tuple(modules), heads, zeroed, original, tuple(dict.fromkeys(notes)))


def _by_module(sites: Iterable[Site]) -> list[tuple[Site, ...]]:
    groups: dict[int, list[Site]] = {}
    for site in sites:
        groups.setdefault(id(site.module), []).append(site)
    return [tuple(group) for group in groups.values()]


def _name(site: Site) -> str:
    return f"{site.stack}.{site.layer}"
