"""Loading: the one place that calls `from_pretrained`.

What comes out is an ordinary transformers model in evaluation mode whose attention is computed eagerly, because the
fused implementations return no weights, together with the tokenizer or processor that its inputs need.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headscope.errors import ModelError, is_out_of_memory
from headscope.models.checkpoint import explain_load_error, first_line, judge_load_report
from headscope.models.given_tokenizer import given_tokenizer
from headscope.models.model_classes import auto_class, concrete_class, own_class_of, writing_class
from headscope.models.packaged import default_model_name
from headscope.models.placement import pick_device, pick_dtype
from headscope.models.promises import check_index, check_numbers
from headscope.models.quiet import quiet
from headscope.models.signature import AUDIO_INPUTS, IMAGE_INPUTS, takes_any
from headscope.models.source import Source, find_source, resolve

if TYPE_CHECKING:
    from headscope.pruning.load import RemovedHeads

__all__ = ["FoundConfig", "LoadedModel", "default_model_name", "load", "load_model", "read_config", "wrap_model"]


@dataclass
class LoadedModel:
    """A model and what belongs to it.

    Attributes:
        model: In evaluation mode, with eager attention unless another one was asked for, or a caller's own.
        name: As the user named it.
        tokenizer: None where the model has none that loads.
        processor: Image processor, feature extractor or composite processor where the model needs one.
        warnings: One line each.
        missing: Names of harmless parameters (heads, poolers) that the checkpoint left newly initialised.
    """

    model: PreTrainedModel
    name: str
    tokenizer: PreTrainedTokenizerBase | None
    processor: Any | None
    warnings: list[str]
    missing: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class _Companions:
    """What `load` remembers of a model. It must not hold the model, or the model would never be freed."""

    name: str
    tokenizer: PreTrainedTokenizerBase | None
    processor: Any | None
    warnings: tuple[str, ...]
    missing: tuple[str, ...]


_companions: WeakKeyDictionary[nn.Module, _Companions] = WeakKeyDictionary()


def load_model(
    name: str | PathLike[str] | None = None,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    need_generation: bool = False,
    own_class: bool | None = False,
    writes: bool = False,
    attn_implementation: str = "eager",
) -> LoadedModel:
    """Load a model with its tokenizer and processor.

    Args:
        name: Hub id, directory or `.gguf` file; None takes `default_model_name()`.
        revision: Branch, tag or commit on the Hub.
        device: `auto` (CUDA, MPS, CPU in this order), or a torch device.
        dtype: A torch dtype or its name; None or `auto` keeps the checkpoint's own.
        device_map: As in transformers; `device` is then not used.
        trust_remote_code: Allow a checkpoint's own Python code to run.
        tokenizer: Another tokenizer, or its hub id or directory.
        need_generation: Load an encoder-decoder with its language-model head, so that it can generate.
        own_class: Load the class that the checkpoint was saved from, with its language-model or classifier head,
            rather than the bare model; None does so where heads were removed from the checkpoint.
        writes: Load a class that can continue texts, where there is one.
        attn_implementation: As in transformers; attention weights can only be read from `eager` attention.

    Raises:
        InputError: No such device or dtype.
        ModelError: The model cannot be loaded, or attention would run on weights that the checkpoint does not have.
        ResourceError: Out of memory.
    """
    target, kind = pick_device(device), pick_dtype(dtype)
    name, source = resolve(name, revision)
    common = source.arguments() | {"trust_remote_code": trust_remote_code}
    try:
        with quiet():
            config, removed = _config(source, common)
            check_index(source, getattr(config, "transformers_weights", None))
            gguf, own = source.gguf_file is not None, removed is not None if own_class is None else own_class
            auto = own_class_of(config, gguf=gguf) if own else auto_class(config, need_generation)
            auto = writing_class(config, gguf=gguf) if writes else auto
            arguments = common | {"dtype": kind, "attn_implementation": attn_implementation}
            if device_map is not None:
                arguments["device_map"] = device_map
            model, report = _from_pretrained(source.path, config, auto, removed, arguments)
        if device_map is None:
            nn.Module.to(model, target)
    except Exception as error:  # transformers raises nearly every class there is; all mean: does not load
        raise _load_error(name, source, error) from error
    warnings, missing = judge_load_report(name, report)
    if attn_implementation == "eager":
        make_eager(model)
    model.train(mode=False)
    loaded = LoadedModel(model, name, None, None, warnings, missing)
    _add_companions(loaded, source, tokenizer, common)
    return loaded


def load(
    name: str | PathLike[str] | None = None,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    need_generation: bool = False,
    own_class: bool | None = None,
    attn_implementation: str = "eager",
) -> PreTrainedModel:
    """Load an ordinary transformers model for `headscope.analyze`, which finds its tokenizer again.

    A directory with a pruned model gives the class that was pruned, with its head, and so do checkpoints of
    transformers 4 with `pruned_heads`. Arguments and errors are those of `headscope.models.loading.load_model`.
    """
    loaded = load_model(
        name,
        revision=revision,
        device=device,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        tokenizer=tokenizer,
        need_generation=need_generation,
        own_class=own_class,
        attn_implementation=attn_implementation,
    )
    _companions[loaded.model] = _Companions(
        loaded.name, loaded.tokenizer, loaded.processor, tuple(loaded.warnings), loaded.missing
    )
    return loaded.model


def wrap_model(
    model: PreTrainedModel, tokenizer: str | PreTrainedTokenizerBase | None = None, processor: Any | None = None
) -> LoadedModel:
    """Bundle a caller's own model with its tokenizer; nothing about the model is changed.

    Without a `tokenizer` it is the one that `load` found with this model, else the one in the model's own directory
    where `model.name_or_path` is a local one. The Hub is never asked.
    """
    tokenizer = given_tokenizer(tokenizer)
    if isinstance(tokenizer, str):
        tokenizer = _named_tokenizer(tokenizer, trust_remote_code=False)
    known = _companions.get(model)
    if known is not None:
        return LoadedModel(
            model,
            known.name,
            tokenizer or known.tokenizer,
            processor or known.processor,
            list(known.warnings),
            known.missing,
        )
    path = str(getattr(model, "name_or_path", "") or "")
    loaded = LoadedModel(model, path or type(model).__name__, tokenizer, processor, [])
    if tokenizer is None and path and (Path(path) / "config.json").is_file():
        source = Source(path, local=True)
        _add_companions(loaded, source, None, source.arguments() | {"trust_remote_code": False})
        loaded.processor = processor or loaded.processor
    return loaded


@dataclass(frozen=True)
class FoundConfig:
    """What a model's configuration says, without its weights.

    Attributes:
        name: As the user named it.
        config: Of the original model, where heads were removed from the checkpoint.
        removed: Which heads the checkpoint lacks, None where it has all.
        auto: The class that the checkpoint was saved from, or the auto class that leads to it; None where transformers
            knows no class for it.
    """

    name: str
    config: PreTrainedConfig
    removed: RemovedHeads | None
    auto: Any


def read_config(
    name: str | PathLike[str] | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> FoundConfig:
    """Read a model's configuration and nothing else.

    A type that transformers does not know gives a plain configuration with what its config.json says; the code that
    comes with such a model is run with `trust_remote_code` only.

    Raises:
        ModelError: There is none, or it cannot be read.
    """
    name, source = resolve(name, revision, weights=False)
    common = source.arguments() | {"trust_remote_code": trust_remote_code}
    try:
        with quiet():
            config, removed = _unknown_config(source, common) or _config(source, common)
    except Exception as error:  # transformers raises nearly every class there is; all mean: cannot be read
        raise _load_error(name, source, error) from error
    try:
        auto = own_class_of(config, gguf=source.gguf_file is not None)
    except ValueError:
        auto = None
    return FoundConfig(name, config, removed, auto)


def _unknown_config(source: Source, common: dict[str, Any]) -> tuple[PreTrainedConfig, None] | None:
    if source.gguf_file is not None or common["trust_remote_code"]:
        return None
    found = PreTrainedConfig.get_config_dict(source.path, **common)[0]
    check_numbers(found)
    kind = found.get("model_type")
    if not kind or kind in CONFIG_MAPPING or found.get("headscope"):
        return None
    config = PreTrainedConfig()
    # As they are: of its own accord the class leaves out what belongs to generation.
    vars(config).update({"dtype": found.get("torch_dtype")} | found)
    return config, None


def _config(source: Source, common: dict[str, Any]) -> tuple[PreTrainedConfig, RemovedHeads | None]:
    """The config of the original model, and which of its heads the checkpoint lacks; None where it is not pruned."""
    if source.gguf_file is None:
        with suppress(OSError):  # no config.json: transformers looks further
            found = PreTrainedConfig.get_config_dict(source.path, **common)[0]
            check_numbers(found)
            if found.get("headscope") or found.get("pruned_heads"):
                from headscope.pruning.load import read_removed_heads

                removed = read_removed_heads(found)
                if removed is not None:
                    check_numbers(removed.config)
                    kind = str(removed.config.get("model_type"))
                    return CONFIG_MAPPING[kind].from_dict(removed.config), removed
    config = AutoConfig.from_pretrained(source.path, **common)
    check_numbers(config.to_dict())
    return config, None


def _from_pretrained(
    path: str, config: PreTrainedConfig, auto: Any, removed: RemovedHeads | None, arguments: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model and its load report. Missing and misshapen weights are in the report, not raised."""
    own = auto if removed is None else concrete_class(auto, config)
    cls: Any = own if removed is None else removed.class_like(own)
    model, report = cls.from_pretrained(
        path,
        config=config,
        weights_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **arguments,
    )
    if removed is not None:
        model.__class__ = own
    return model, report


def load_plainly(
    directory: str | Path, auto: str, *, device: str | torch.device = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a local checkpoint as it loads where there is no headscope; whatever transformers raises is not translated.

    Args:
        auto: Name of a class of transformers, such as `AutoModelForCausalLM`.
    """
    with quiet():
        cls: Any = getattr(transformers, auto)
        model: PreTrainedModel = cls.from_pretrained(
            directory, dtype="auto", local_files_only=True, trust_remote_code=trust_remote_code
        )
    model.train(mode=False)
    nn.Module.to(model, device)
    return model


def make_eager(model: PreTrainedModel) -> None:
    """Make every submodule's own configuration eager: composites hand the choice down to some of them only."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation != "eager":
            config._attn_implementation = "eager"


def _load_error(name: str, source: Source, error: Exception) -> Exception:
    if not source.local and source.files_only and isinstance(error, OSError):
        return ModelError(
            f"{name} is not a directory here, the Hub cannot be reached, and its cache does not have the model",
            "check the spelling and the network, or give a local directory",
        )
    return explain_load_error(name, error, local=source.local)


def _add_companions(
    loaded: LoadedModel, source: Source, tokenizer: str | PreTrainedTokenizerBase | None, common: dict[str, Any]
) -> None:
    """Load processor and tokenizer, as far as the model needs them and they are there. None is required."""
    if takes_any(loaded.model, IMAGE_INPUTS + AUDIO_INPUTS):
        loaded.processor = _first_that_loads(_processor_classes(loaded.model), source, common)
    tokenizer = given_tokenizer(tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        loaded.tokenizer = tokenizer
    elif tokenizer is not None:
        loaded.tokenizer = _named_tokenizer(tokenizer, common["trust_remote_code"])
    elif getattr(loaded.processor, "tokenizer", None) is not None:
        loaded.tokenizer = getattr(loaded.processor, "tokenizer", None)
    elif takes_any(loaded.model, ("input_ids", "decoder_input_ids")):
        loaded.tokenizer = _first_that_loads((AutoTokenizer,), source, common)


def _processor_classes(model: PreTrainedModel) -> tuple[Any, ...]:
    """Composite processors only help a model that also takes text; elsewhere the plain ones are meant."""
    both = [AutoProcessor] if takes_any(model, ("input_ids", "decoder_input_ids")) else []
    images = [AutoImageProcessor] if takes_any(model, IMAGE_INPUTS) else []
    sounds = [AutoFeatureExtractor] if takes_any(model, AUDIO_INPUTS) else []
    return (*both, *images, *sounds)


def _first_that_loads(classes: tuple[Any, ...], source: Source, common: dict[str, Any]) -> Any | None:
    for candidate in classes:
        try:
            with quiet():
                found = candidate.from_pretrained(source.path, **common)
        except Exception as error:
            # A missing or foreign file raises nearly any class. What the input then lacks is said where it is needed.
            if is_out_of_memory(error):
                raise
            continue
        if candidate is AutoTokenizer or not isinstance(found, PreTrainedTokenizerBase):
            return found
    return None


def _named_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    path = Path(os.path.expanduser(name))
    try:
        source = Source(str(path), local=True) if os.path.isdir(path) else find_source(name)
        with quiet():
            found = AutoTokenizer.from_pretrained(
                source.path, trust_remote_code=trust_remote_code, **source.arguments()
            )
    except Exception as error:  # as above: whatever it is, this tokenizer does not load
        raise ModelError(
            f"the tokenizer {name} cannot be loaded: {first_line(error)}",
            "name a directory that holds tokenizer.json or a vocabulary",
        ) from error
    assert isinstance(found, PreTrainedTokenizerBase)
    return found
