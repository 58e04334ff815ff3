"""A small modelling file of its own for a pruned model, so that transformers loads it without headscope.

The file subclasses the model's classes and cuts their parameters in `__init__`, before weights are loaded. What it cuts
is written out, from the same edits that pruning makes; what a forward pass needs besides, such as a position bias for
each original head, comes with the source of the classes that pruning uses for it.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModel, PreTrainedModel
from transformers.dynamic_module_utils import _sanitize_module_name
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME  # type: ignore[attr-defined]  # no __all__
from transformers.utils.hub import HF_MODULES_CACHE

from headscope.errors import InputError
from headscope.models.model_classes import auto_name
from headscope.pruning import runtime
from headscope.pruning.numbers import TRACKED
from headscope.pruning.plan import Plan, current_plan
from headscope.pruning.restore import original_twin, spans_left
from headscope.pruning.runtime import ConfigView, SharedBias, Subset, shares_bias, takes_per_head
from headscope.pruning.saved import KEY, plan_to_dict, read_plan
from headscope.pruning.standalone import cut, say_numbers, share_bias, subset_inputs, view_configs
from headscope.pruning.surgery import prepare

MODULE = "modeling_headscope"
PREFIX = "headscope_"
_STRUCTURAL = "Save it as structural."


def write_remote_code(model: PreTrainedModel, folder: Path) -> None:
    """Write the file beside a saved model and name it in its config.json.

    Raises:
        InputError: The model has code of its own already, or lists of modules for each head.
    """
    cls, config_class = type(model), type(model.config)
    if not cls.__module__.startswith("transformers."):
        raise InputError(f"{cls.__name__} comes with code of its own, so no file can be made for it", _STRUCTURAL)
    (folder / f"{MODULE}.py").write_text(source_of(model), "utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    kind = config.get("model_type")
    config[KEY] |= {"model_type": kind, "class": cls.__name__}
    config |= {"model_type": f"{PREFIX}{kind}"}
    config["architectures"] = [f"Pruned{cls.__name__}"]
    config["auto_map"] = {"AutoConfig": f"{MODULE}.Pruned{config_class.__name__}"} | {
        auto: f"{MODULE}.Pruned{name}" for auto, name in _auto_classes(model).items()
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def remote_auto(folder: Path) -> str:
    """The auto class that gives a saved model's own class."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    own = f"{MODULE}.{config['architectures'][0]}"
    names = [auto for auto, target in config["auto_map"].items() if target == own]
    return str(names[-1])


def forget_module(folder: Path) -> None:
    """Remove what transformers put into its cache of modules when it loaded a model from a temporary directory."""
    name = _sanitize_module_name(folder.name)
    shutil.rmtree(Path(HF_MODULES_CACHE) / TRANSFORMERS_DYNAMIC_MODULE_NAME / name, ignore_errors=True)


def _base(model: PreTrainedModel) -> type[PreTrainedModel] | None:
    found = AutoModel._model_mapping.get(type(model.config), None)
    return found if isinstance(found, type) else None


def _auto_classes(model: PreTrainedModel) -> dict[str, str]:
    """The classes in the file, by the auto classes that give them."""
    cls, base = type(model), _base(model)
    classes = {"AutoModel": cls.__name__ if base is None else base.__name__}
    own = auto_name(cls, model.config)
    if own is not None:
        classes.setdefault(own, cls.__name__)
    return classes


# ------------------------------------------------------------------ the text of the file
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
    classes = list(dict.fromkeys([*_auto_classes(model).values(), type(model).__name__]))
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
    lines = ["import inspect"] if hooks else []
    lines += ["from collections.abc import Sequence"] if hooks else []
    lines += ["from typing import Any", "", "import torch", f"from torch import {'Tensor, ' if hooks else ''}nn"]
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
                raise InputError(f"{path} has one {change.name} a head, which no file is made for", _STRUCTURAL)
        if part.after.removed and takes_per_head(module):
            inputs[path] = (list(part.after.kept), part.after.num_heads)
    shared = any(shares_bias(part.sites[0].module) for part in plan.modules)
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
