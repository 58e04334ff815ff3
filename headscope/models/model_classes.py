"""Which class a checkpoint is loaded with."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

GENERATING_CLASSES = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)
# Old names of other auto classes, and classes for training.
_NOT_FOR_LOADING = {"AutoModelWithLMHead", "AutoModelForPreTraining"}


def _architectures(config: PreTrainedConfig) -> list[str]:
    """The names of classes in a config; whatever else stands there is none."""
    found = getattr(config, "architectures", None)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list | tuple) else []


def _auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """Classes of the checkpoint's own code by the auto classes that give them."""
    found = getattr(config, "auto_map", None)
    pairs = found.items() if isinstance(found, dict) else ()
    first = ((key, value[0] if isinstance(value, list | tuple) and value else value) for key, value in pairs)
    return {key: target for key, target in first if isinstance(target, str)}


def _class_called(name: str) -> Any:
    """A model's class or auto class; None for all else that transformers has, which a config could name as well."""
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or found is PreTrainedModel:
        return None
    return found if issubclass(found, PreTrainedModel | _BaseAutoModelClass) else None


def auto_class(config: PreTrainedConfig, need_generation: bool) -> Any:
    """The class to load with: the bare model wherever there is one, so that no head is in the way."""
    auto_map = _auto_map(config)
    if need_generation and getattr(config, "is_encoder_decoder", False):
        for candidate in GENERATING_CLASSES:
            if type(config) in candidate._model_mapping or candidate.__name__ in auto_map:
                return candidate
    if type(config) in AutoModel._model_mapping or "AutoModel" in auto_map:
        return AutoModel
    for name in (*(key for key in auto_map if key.startswith("AutoModelFor")), *_architectures(config)):
        if (found := _class_called(name)) is not None:
            return found
    raise ValueError(f"transformers has no model class for {config.model_type!r}")


def own_class_of(config: PreTrainedConfig, *, gguf: bool = False) -> Any:
    """The class that the config names, or the auto class that leads to it where it is the checkpoint's own code.

    A `.gguf` file names none; nearly all of them hold language models.
    """
    named = _architectures(config)
    autos = (key for key, target in _auto_map(config).items() if target.rpartition(".")[2] in named)
    for name in (*autos, *named):
        if (found := _class_called(name)) is not None:
            return found
    if gguf and type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    return auto_class(config, need_generation=True)


def writing_class(config: PreTrainedConfig, *, gguf: bool = False) -> Any:
    """The class that writes text: an encoder-decoder with its language-model head, any other as its checkpoint says.

    A checkpoint of a bare model gets a language-model head too: many share its weights with the embeddings.
    """
    if getattr(config, "is_encoder_decoder", False):
        return auto_class(config, need_generation=True)
    own, bare = own_class_of(config, gguf=gguf), AutoModel._model_mapping.get(type(config), None)
    is_bare = own is AutoModel or own is bare
    return AutoModelForCausalLM if is_bare and type(config) in AutoModelForCausalLM._model_mapping else own


def concrete_class(auto: Any, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of transformers that an auto class stands for; any other class is itself.

    Raises:
        ValueError: The auto class has none for this config.
    """
    if not hasattr(auto, "_model_mapping"):
        cls: type[PreTrainedModel] = auto
        return cls
    found = auto._model_mapping.get(type(config), None)
    if found is None:
        raise ValueError(f"transformers has no {auto.__name__} for {config.model_type!r}")
    choices = found if isinstance(found, list | tuple) else (found,)
    named = _architectures(config)
    chosen: type[PreTrainedModel] = next((c for c in choices if c.__name__ in named), choices[0])
    return chosen


def auto_name(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """The name of an auto class that gives `cls` for a config, `AutoModel` before all others; None if there is none."""
    for name, auto in sorted(vars(modeling_auto).items()):
        if not name.startswith("AutoModel") or name in _NOT_FOR_LOADING:
            continue
        mapping = getattr(auto, "_model_mapping", None)
        found = None if mapping is None else mapping.get(type(config), None)
        if cls is found or (isinstance(found, list | tuple) and cls in found):
            return name
    return None
