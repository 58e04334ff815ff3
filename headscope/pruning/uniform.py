"""A pruned model as a plain checkpoint with other numbers in its config, where its class can be built from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headscope.errors import InputError, ModelError
from headscope.models.exceptions import SAME_WITHOUT_WIDTH_CHECK
from headscope.models.projections import projections, state_of
from headscope.models.pruned import HeadState
from headscope.models.sites import Site, find_sites
from headscope.pruning.edits import Slot
from headscope.pruning.numbers import HEADS, KV_HEADS
from headscope.pruning.restore import restore
from headscope.pruning.runtime import ConfigView, shares_bias
from headscope.pruning.spec import write_heads

ALTERNATIVES = "Save it as structural, remote-code or masked."
_WIDTH = "its code takes the width of a head from its own and the number of heads, so that fewer would be wider"


@dataclass(frozen=True)
class Uniform:
    """What is to be saved.

    Attributes:
        model: Padded where that was asked for.
        weights: The model with parameters as they are saved; it need not run.
        config: With the new numbers of heads.
        extra: For the `headscope` entry of the config: the numbers of the original. Empty where there shall be no such
            entry, since heads are counted anew.
        notes: One line each.
    """

    model: PreTrainedModel
    weights: PreTrainedModel
    config: PreTrainedConfig
    extra: dict[str, Any]
    notes: tuple[str, ...]


def as_uniform(model: PreTrainedModel, *, pad: bool = False) -> Uniform:
    """A model whose config alone says how many heads it has. Whether that is possible is found by trying.

    Args:
        model: Pruned; it stays as it is.
        pad: Give each layer as many heads as the largest has, zeros where it has fewer.

    Raises:
        InputError: Layers differ, or the model's class cannot be built with these numbers.
    """
    notes: list[str] = []
    states = _states(model)
    if pad:
        zeroed = _padding(states, same=any(shares_bias(site.module) for site in find_sites(model)))
        if any(set(zeroed[name]) != set(states[name].zeroed) for name in zeroed):
            model = copy.deepcopy(model)
            restore(model, zeroed)
            states = _states(model)
            count = sum(len(zeroed[name]) for name in zeroed)
            notes.append(f"{count} heads are zeros, so that every layer has as many as the largest")
        if all(not state.removed for state in states.values()):
            notes.append("one layer has all of its heads: padded to it, the model is neither smaller nor faster")
    _check_equal(states)
    config, before = _config(model, states)
    anew = any(shares_bias(site.module) for site in find_sites(model))
    weights = model
    if anew:
        weights = _with_narrow_tables(model, states)
        notes.append("heads are counted anew: its table of biases has columns for those that are left only")
    _check_builds(weights, config)
    return Uniform(model, weights, config, {} if anew else {"config": before}, tuple(notes))


def _states(model: PreTrainedModel) -> dict[str, HeadState]:
    """The heads of every layer, pruned or not."""
    states = {}
    for site in find_sites(model):
        try:
            states[f"{site.stack}.{site.layer}"] = state_of(site, projections(site, model=model))
        except ModelError:  # heads that cannot be told apart were not removed
            continue
    return states


# ------------------------------------------------------------------ equally many heads
def _padding(states: Mapping[str, HeadState], *, same: bool) -> dict[str, tuple[int, ...]]:
    """Heads that have to be in the weights as zeros, so that all layers are as large as the largest.

    Args:
        same: All layers of a stack have to keep the same heads, too.
    """
    if same:
        stacks = _by_stack({name: state.kept for name, state in states.items()})
        union = {stack: {h for kept in choices for h in kept} for stack, choices in stacks.items()}
        states = {name: _keeping(state, union[name.rpartition(".")[0]]) for name, state in states.items()}
    kv_heads = max(len(s.kept_kv) for s in states.values())
    group = max(len(s.kept) // len(s.kept_kv) for s in states.values())
    return {name: _filled(state, kv_heads, group) for name, state in states.items() if state.gone}


def _keeping(state: HeadState, heads: set[int]) -> HeadState:
    """The state with heads put back, zeroed."""
    back = set(state.zeroed) | (set(state.removed) & heads)
    return replace(state, removed=tuple(h for h in state.removed if h not in back), zeroed=tuple(sorted(back)))


def _filled(state: HeadState, kv_heads: int, group: int) -> tuple[int, ...]:
    """The gone heads of a layer that are among the first that make `kv_heads` groups of `group`."""
    others = [g for g in range(state.num_kv_heads) if g not in state.kept_kv]
    chosen = sorted([*state.kept_kv, *others[: kv_heads - len(state.kept_kv)]])
    heads = set(state.kept)
    for g in chosen:
        own = range(g * state.group, (g + 1) * state.group)
        missing = group - len(heads & set(own))
        heads |= set([h for h in own if h not in heads][:missing])
    return tuple(sorted(heads & set(state.gone)))


def _check_equal(states: Mapping[str, HeadState]) -> None:
    counts = {(len(s.kept), len(s.kept_kv)) for s in states.values()}
    if len(counts) > 1:
        each = ", ".join(f"{name} {_count(s)}" for name, s in list(states.items())[:8])
        raise InputError(
            f"uniform needs equally many heads in every layer, here are left: {each}{', …' if len(states) > 8 else ''}",
            f"Fill layers up with zeros (--pad). {ALTERNATIVES}",
        )


def _count(state: HeadState) -> str:
    own = f" ({len(state.kept_kv)} key-value)" if state.group > 1 else ""
    return f"{len(state.kept)}{own}"


# ------------------------------------------------------------------ the config
def _config(model: PreTrainedModel, states: Mapping[str, HeadState]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """A config with the numbers of heads that are left; what it said before, by the path of each entry."""
    config = copy.deepcopy(model.config)
    before: dict[str, Any] = {}
    for site in find_sites(model):
        state = states.get(f"{site.stack}.{site.layer}")
        if state is None:
            continue
        prefix, holder = _holder(model.config, config, site)
        _set_numbers(holder, prefix, state, before)
    return config, before


def _holder(old: PreTrainedConfig, new: PreTrainedConfig, site: Site) -> tuple[str, PreTrainedConfig]:
    """The part of the new config that a module reads, with its path."""
    own = getattr(site.module, "config", old)
    own = own.base if isinstance(own, ConfigView) else own
    for name, part in vars(old).items():
        if part is own and isinstance(part, PreTrainedConfig):
            return f"{name}.", getattr(new, name)
    return "", new


def _set_numbers(config: PreTrainedConfig, prefix: str, state: HeadState, before: dict[str, Any]) -> None:
    numbers = [(n, state.num_heads, len(state.kept)) for n in HEADS]
    numbers += [(n, state.num_kv_heads, len(state.kept_kv)) for n in KV_HEADS]
    written = config.to_dict()
    for name, old, new in numbers:
        stored = type(config).attribute_map.get(name, name)
        if stored in written and getattr(config, stored) == old and f"{prefix}{stored}" not in before:
            before[f"{prefix}{stored}"] = old
            setattr(config, stored, new)
    if "d_kv" not in written:
        config.head_dim = state.head_dim


def _check_builds(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Build the model from the config, without values, and compare shapes."""
    name = type(model).__name__
    try:
        built = _built(model, config)
    except Exception as error:  # a config's own checks, and code that divides what it should not
        fits = _other_counts(model)
        why = f"it does not take these numbers of heads: {_last_line(error)}" if fits else _WIDTH
        raise InputError(f"{name} cannot be uniform: {why}", f"{fits}{ALTERNATIVES}") from error
    wanted = {key: tuple(t.shape) for key, t in built.state_dict().items()}
    for key, tensor in model.state_dict().items():
        if wanted.get(key) != tuple(tensor.shape):
            raise InputError(
                f"{name} cannot be uniform: {_WIDTH}: {key} would be {wanted.get(key)}, not {tuple(tensor.shape)}",
                ALTERNATIVES,
            )


def _built(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return type(model)(type(config).from_dict(config.to_dict()))


def _last_line(error: Exception) -> str:
    """What a config's check says; its first line is only the check's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _other_counts(model: PreTrainedModel) -> str:
    """Numbers of heads that the model's class does take, where it wants its width to be a multiple of them."""
    width, states = getattr(model.config, "hidden_size", None), _states(model)
    most = max(s.num_heads for s in states.values())
    fits = [n for n in range(1, most) if isinstance(width, int) and width % n == 0 and _takes(model, states, n)]
    if not fits:
        return ""
    other = SAME_WITHOUT_WIDTH_CHECK.get(model.config.model_type)
    relabel = f", or make it a {other}, whose config does not mind" if other else ""
    return f"It takes {write_heads(fits)} heads: choose another plan, or fill layers up (--pad){relabel}. "


def _takes(model: PreTrainedModel, states: Mapping[str, HeadState], count: int) -> bool:
    """Whether the class can be built with so many heads, each as wide as before."""
    first = {n: replace(s, removed=tuple(range(count, s.num_heads)), zeroed=()) for n, s in states.items()}
    try:
        built = _built(model, _config(model, first)[0])
        return all(s.head_dim == states[n].head_dim for n, s in _states(built).items())
    except Exception:  # as above: then it cannot
        return False


# ------------------------------------------------------------------ T5
def _with_narrow_tables(model: PreTrainedModel, states: Mapping[str, HeadState]) -> PreTrainedModel:
    """A copy whose tables of biases, which the layers of a stack share, have a column for each head that is left."""
    kept = {name: state.kept for name, state in states.items() if not name.startswith("cross")}
    for stack, choices in _by_stack(kept).items():
        if len(set(choices)) > 1:
            raise InputError(
                f"{type(model).__name__} cannot be uniform: the layers of its {stack} share a table of biases, so all "
                "have to lose the same heads",
                ALTERNATIVES,
            )
    model = copy.deepcopy(model)
    for site in find_sites(model):
        table = getattr(site.module, "relative_attention_bias", None)
        if isinstance(table, nn.Embedding):
            index = torch.tensor(states[f"{site.stack}.{site.layer}"].kept, device=table.weight.device)
            Slot(table, "weight").replace(table.weight.detach().index_select(1, index))
    return model


def _by_stack(kept: Mapping[str, Sequence[int]]) -> dict[str, list[tuple[int, ...]]]:
    stacks: dict[str, list[tuple[int, ...]]] = {}
    for name, heads in kept.items():
        stacks.setdefault(name.rpartition(".")[0], []).append(tuple(heads))
    return stacks
