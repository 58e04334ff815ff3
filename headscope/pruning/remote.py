"""A small modelling file of its own for a pruned model, so that transformers loads it without headscope.

The file subclasses the model's classes and cuts their parameters in `__init__`, before weights are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import _sanitize_module_name
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME  # type: ignore[attr-defined]  # no __all__
from transformers.utils.hub import HF_MODULES_CACHE

from headscope.errors import InputError
from headscope.files import passing
from headscope.pruning.remote_source import PREFIX, STRUCTURAL, auto_classes, source_of
from headscope.pruning.saved import KEY

MODULE = "modeling_headscope"


def write_remote_code(model: PreTrainedModel, folder: Path) -> None:
    """Write the file beside a saved model and name it in its config.json.

    Raises:
        InputError: The model has code of its own already, or lists of modules for each head.
    """
    cls, config_class = type(model), type(model.config)
    if not cls.__module__.startswith("transformers."):
        raise InputError(f"{cls.__name__} comes with code of its own, so no file can be made for it", STRUCTURAL)
    (folder / f"{MODULE}.py").write_text(source_of(model), "utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    kind = config.get("model_type")
    config[KEY] |= {"model_type": kind, "class": cls.__name__}
    config |= {"model_type": f"{PREFIX}{kind}"}
    config["architectures"] = [f"Pruned{cls.__name__}"]
    config["auto_map"] = {"AutoConfig": f"{MODULE}.Pruned{config_class.__name__}"} | {
        auto: f"{MODULE}.Pruned{name}" for auto, name in auto_classes(model).items()
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def remote_auto(folder: Path) -> str:
    """The auto class that gives a saved model's own class."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    own = f"{MODULE}.{config['architectures'][0]}"
    names = [auto for auto, target in config["auto_map"].items() if target == own]
    return str(names[-1])


@contextmanager
def module_forgotten(folder: Path) -> Iterator[None]:
    """What transformers puts into its cache of modules when it loads a model from a temporary directory goes again."""
    name = _sanitize_module_name(folder.name)
    with passing(Path(HF_MODULES_CACHE) / TRANSFORMERS_DYNAMIC_MODULE_NAME / name):
        yield
