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

GENERATING_CLASSES = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)
# Old names of other auto classes, and classes for training.
_NOT_FOR_LOADING = {"AutoModelWithLMHead", "AutoModelForPreTraining"}


def auto_class(config: PreTrainedConfig, need_generation: bool) -> Any:
    """The class to load with: the bare model wherever there is one, so that no head is in the way."""
    auto_map = getattr(config, "auto_map", None) or {}
    if need_generation and getattr(config, "is_encoder_decoder", False):
        for candidate in GENERATING_CLASSES:
            if type(config) in candidate._model_mapping or candidate.__name__ in auto_map:
                return candidate
    if type(config) in AutoModel._model_mapping or "AutoModel" in auto_map:
        return AutoModel
    for key in auto_map:
        if key.startswith("AutoModelFor") and hasattr(transformers, key):
            return getattr(transformers, key)
    for architecture in getattr(config, "architectures", None) or ():
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    raise ValueError(f"transformers has no model class for {config.model_type!r}")


def own_class_of(config: PreTrainedConfig, *, gguf: bool = False) -> Any:
    """The class that the config names, or the auto class that leads to it where it is the checkpoint's own code.

    A `.gguf` file names none; nearly all of them hold language models.
    """
    named = list(getattr(config, "architectures", None) or ())
    for key, value in (getattr(config, "auto_map", None) or {}).items():
        target = value[0] if isinstance(value, list | tuple) else value
        if str(target).rpartition(".")[2] in named and hasattr(transformers, key):
            return getattr(transformers, key)
    for architecture in named:
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
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
    named = set(getattr(config, "architectures", None) or ())
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
