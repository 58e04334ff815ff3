"""A model without values: built from its configuration on the meta device, it takes no memory and has every shape."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from headscope.errors import HeadscopeError
from headscope.models.loading import FoundConfig
from headscope.models.model_classes import concrete_class
from headscope.models.quiet import quiet


def build_skeleton(found: FoundConfig, *, trust_remote_code: bool = False) -> PreTrainedModel | None:
    """The model of a configuration on the meta device, without the heads that its checkpoint lacks.

    Returns:
        None where the model cannot be built so: transformers does not know it, or its code looks at values.

    Raises:
        ModelError: Removed heads do not fit the model.
    """
    if found.auto is None:
        return None
    try:
        with quiet(), torch.device("meta"):
            return _built(found, trust_remote_code)
    except HeadscopeError:
        raise
    except Exception:  # a model's own code may raise anything when it meets a tensor without values
        return None


def _built(found: FoundConfig, trust_remote_code: bool) -> PreTrainedModel:
    config = copy.deepcopy(found.config)
    if trust_remote_code and getattr(config, "auto_map", None) and hasattr(found.auto, "from_config"):
        made: PreTrainedModel = found.auto.from_config(config, trust_remote_code=True)
        return made
    cls = concrete_class(found.auto, config)
    as_saved: Any = cls if found.removed is None else found.removed.class_like(cls)
    model: PreTrainedModel = as_saved._from_config(config, attn_implementation="eager")
    model.__class__ = cls
    return model
