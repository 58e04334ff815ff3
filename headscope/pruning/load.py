"""Pruned checkpoints: what their config.json says, and the class that builds a model as they have it.

Such a config keeps the numbers of heads of the original model, so that plain `from_pretrained` fails loudly. To load
it, transformers is given a throw-away subclass of the model's class, which removes the same heads again as soon as the
model is built and before weights come in. Everything else, shards, ties, renamed keys, dtypes, devices, is left to
transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from headscope.errors import InputError, ModelError
from headscope.models.pruned import set_pruned_state
from headscope.pruning.plan import make_plan
from headscope.pruning.saved import KEY, read_plan, write_plan
from headscope.pruning.surgery import apply

VERSION4_KEY = "pruned_heads"


@dataclass(frozen=True)
class RemovedHeads:
    """What the config.json of a pruned checkpoint says.

    Attributes:
        config: The same config for the original model, of a type that transformers knows.
        saved: The `headscope` entry, with the plan that `headscope.pruning.saved` describes and what is special to a
            form of saving; empty for a checkpoint of transformers 4.
        version4: Heads by layer, as `prune_heads` of transformers 4 left them: JSON makes strings of layers. Empty for
            our own.
    """

    config: dict[str, Any]
    saved: Mapping[str, Any]
    version4: Mapping[str, Any]

    def class_like(self, cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """A subclass of `cls`, under its name, whose models lack these heads from the start."""

        def build(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            cls.__init__(model, *args, **kwargs)
            self.remove(model)

        names = {"__init__": build, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        return type(cls.__name__, (cls,), names)

    def remove(self, model: PreTrainedModel) -> None:
        """Remove these heads from a model that has them all.

        Raises:
            ModelError: They do not fit the model.
        """
        if self.version4:
            _remove_version4(model, self.version4)
            return
        plan = read_plan(model, self.saved)
        if any(part.after.removed for part in plan.modules):
            apply(model, plan)
            return
        # Nothing but zeros: then this may be a model from which heads cannot be removed.
        for part in plan.modules:
            set_pruned_state(part.sites[0].module, part.after)
        write_plan(model, plan)


def read_removed_heads(config: Mapping[str, Any]) -> RemovedHeads | None:
    """What a config.json says of removed heads; None where it says nothing.

    Raises:
        ModelError: It cannot be understood.
    """
    saved, version4 = config.get(KEY) or {}, config.get(VERSION4_KEY) or {}
    if not isinstance(saved, Mapping) or not isinstance(version4, Mapping):
        raise ModelError("what config.json says of removed heads cannot be read", "Was it changed by hand?")
    version4 = {layer: heads for layer, heads in version4.items() if heads}
    if not saved and not version4:
        return None
    original = copy.deepcopy({k: v for k, v in config.items() if k not in (KEY, VERSION4_KEY)})
    if saved.get("model_type"):  # with code of its own, which is not needed here
        original |= {"model_type": saved.get("model_type"), "architectures": [saved["class"]]}
        original.pop("auto_map", None)
    for path, value in saved.get("config", {}).items():
        *parents, name = path.split(".")
        holder = original
        for parent in parents:
            holder = holder[parent]
        holder[name] = value
    return RemovedHeads(original, saved, {} if saved else version4)


def _remove_version4(model: PreTrainedModel, heads: Mapping[str, Any]) -> None:
    try:
        apply(model, make_plan(model, heads))
    except InputError as error:
        raise ModelError(
            f"the {VERSION4_KEY} of config.json do not fit the model: {error.message}",
            "is the config.json the one of these weights?",
        ) from error
