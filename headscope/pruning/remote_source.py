"""The text of a pruned model's own modelling file.

What the file cuts is written out, from the same edits that pruning makes; what a forward pass needs besides, such as a
position bias for each original head, comes with the source of the classes that pruning uses for it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoModel, PreTrainedModel

from headscope.errors import InputError
from headscope.models.model_classes import auto_name
from headscope.pruning import runtime
from headscope.pruning.caches import fewer_kv_heads
from headscope.pruning.numbers import TRACKED
from headscope.pruning.plan import Plan, current_plan
from headscope.pruning.restore import original_twin, spans_left
from headscope.pruning.runtime import ConfigView, SharedBias, Subset, shares_bias, takes_per_head
from headscope.pruning.saved import plan_to_dict, read_plan
from headscope.pruning.standalone import (
    cut,
    no_continuous_batching,
    say_numbers,
    shape_of_first_keys,
    share_bias,
    size_caches,
    subset_inputs,
    view_configs,
)
from headscope.pruning.surgery import prepare

PREFIX = "headscope_"
STRUCTURAL = "Save it as structural."


def _base(model: PreTrainedModel) -> type[PreTrainedModel] | None:
    found = AutoModel._model_mapping.get(type(model.config), None)
    return found if isinstance(found, type) else None


def auto_classes(model: PreTrainedModel) -> dict[str, str]:
    """The classes in the file, by the auto classes that give them."""
    cls, base = type(model), _base(model)
    classes = {"AutoModel": cls.__name__ if base is None else base.__name__}
    own = auto_name(cls, model.config)
    if own is not None:
        classes.setdefault(own, cls.__name__)
    return classes


_TOP = '''"""{name} without some of its attention heads. Load it with trust_remote_code=True.

Removed heads, in the numbers of the original model:

{heads}
"""

from __future__ import annotations

{imports}
'''
_CONFIG = '''

class Pruned{config}({config}):
    """The original model's config under a name of its own."""

    model_type = "{model_type}"
'''
_CLASS = '''

class Pruned{name}({name}):
    """`{name}`, built with the heads that are left."""

    config_class = Pruned{config}

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
{calls}
'''


@dataclass(frozen=True)
class _Step:
    """One table in the file, and the function that carries it out, with the source of what that needs."""

    table: str
    comment: str
    rows: Sequence[str]
    function: Callable[..., None]
    needs: tuple[Any, ...] = ()

    def text(self) -> str:
        opening, closing = ("[", "]") if self.table == "CUTS" else ("{", "}")
        return "\n".join([f"# {self.comment}", f"{self.table} = {opening}", *self.rows, closing, ""])


def source_of(model: PreTrainedModel) -> str:
    """The text of the modelling file. Raises InputError for modules with lists of norms for each head."""
    twin = original_twin(model)
    plan = read_plan(twin, plan_to_dict(current_plan(model)))
    prefix = _base_prefix(twin)
    steps = [step for step in _steps(model, twin, plan, prefix) if step.rows]
    classes = list(dict.fromkeys([*auto_classes(model).values(), type(model).__name__]))
    config = type(model.config).__name__
    heads = "\n".join(f"    {name}: {', '.join(map(str, heads))}" for name, heads in plan.heads.items())
    text = _TOP.format(name=type(model).__name__, heads=heads, imports=_imports(model, classes, steps))
    text += "".join(step.text() for step in steps)
    for part in dict.fromkeys(part for step in steps for part in (*step.needs, step.function)):
        text += f"\n\n{inspect.getsource(part)}" if not isinstance(part, str) else f"{part}\n"
    text += _CONFIG.format(config=config, model_type=PREFIX + model.config.model_type)
    for name in classes:
        inside = prefix if name == type(model).__name__ else ""
        calls = "\n".join(f'        {step.function.__name__}(self, "{inside}", {step.table})' for step in steps)
        text += _CLASS.format(name=name, config=config, calls=calls)
    return text


def _base_prefix(twin: PreTrainedModel) -> str:
    """Where the bare model lies in a model with a head: `model.`; empty where there is none, or its layers lie free."""
    base = _base(twin)
    paths = [path for path, module in twin.named_modules() if type(module) is base]
    return f"{paths[0]}." if paths and paths[0] else ""


def _imports(model: PreTrainedModel, classes: Sequence[str], steps: Sequence[_Step]) -> str:
    hooks = any(Subset in step.needs for step in steps)
    typing = "Any, NoReturn" if any(no_continuous_batching in step.needs for step in steps) else "Any"
    lines = ["import inspect"] if hooks else []
    lines += ["from collections.abc import Sequence"] if hooks else []
    lines += [f"from typing import {typing}", "", "import torch", f"from torch import {'Tensor, ' if hooks else ''}nn"]
    names = {type(model.config).__name__: type(model.config).__module__}
    names |= {name: type(model).__module__ for name in classes}
    for module in sorted(set(names.values())):
        lines.append(f"from {module} import {', '.join(sorted(n for n in names if names[n] == module))}")
    return "\n".join(lines) + "\n"


def _steps(model: PreTrainedModel, twin: PreTrainedModel, plan: Plan, prefix: str) -> list[_Step]:
    numbers: dict[str, Any] = {}
    views: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    paths = {id(module): path.removeprefix(prefix) for path, module in twin.named_modules()}
    for part, edits in zip(plan.modules, prepare(twin, plan), strict=True):
        module = part.sites[0].module
        path = paths[id(module)]
        for change in edits.sets:
            if isinstance(change.value, ConfigView):
                views[path] = change.value.numbers
            elif isinstance(change.value, int):
                numbers.setdefault(path, {})[change.name] = change.value
            elif change.name != TRACKED:
                raise InputError(f"{path} has one {change.name} a head, which no file is made for", STRUCTURAL)
        if part.after.removed and takes_per_head(module):
            inputs[path] = (list(part.after.kept), part.after.num_heads)
    shared = any(shares_bias(part.sites[0].module) for part in plan.modules)
    caches = {path.removeprefix(prefix): n for path, n in fewer_kv_heads(model).items() if hasattr(model, "generate")}
    constants = (
        f"PER_HEAD_ARGUMENTS = {runtime.PER_HEAD_ARGUMENTS!r}".replace("'", '"'),
        f"_MASKS = {runtime._MASKS!r}".replace("'", '"'),
    )
    needs = (*constants, runtime._named, Subset)
    return [
        _Step("CUTS", "Axis, entries that stay from first to last + 1, of which parameters", _cuts(model, prefix), cut),
        _Step("NUMBERS", "What modules know of their heads", _rows(numbers), say_numbers),
        _Step("VIEWS", "What modules ask their config for", _rows(views), view_configs, (ConfigView,)),
        _Step(
            "INPUTS",
            "Modules that are told something for each original head: the heads left, the number that there were",
            _rows(inputs),
            share_bias if shared else subset_inputs,
            (*needs, SharedBias) if shared else needs,
        ),
        _Step(
            "KV_HEADS",
            "Key-value heads that are left of those in the config",
            _rows(caches),
            size_caches,
            (shape_of_first_keys, no_continuous_batching),
        ),
    ]


def _rows(table: dict[str, Any]) -> list[str]:
    return [f"    {json.dumps(path)}: {json.dumps(value)}," for path, value in table.items()]


def _cuts(model: PreTrainedModel, prefix: str) -> list[str]:
    """A line for all parameters of a module that are cut alike."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    for path, span in spans_left(model).items():
        if len(span.index) == span.size:
            continue
        path = path.removeprefix(prefix)
        holder, _, name = path.rpartition(".")
        above, _, last = holder.rpartition(".")
        groups.setdefault((above, span.axis, json.dumps(_ranges(span.index.tolist()))), []).append(f"{last}.{name}")
    return [
        f"    ({axis}, {spans}, {json.dumps(path)}, {json.dumps(' '.join(names))}),"
        for (path, axis, spans), names in groups.items()
    ]


def _ranges(index: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as runs from the first to the last + 1."""
    runs: list[list[int]] = []
    for i in index:
        if runs and runs[-1][1] == i:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1])
    return runs
