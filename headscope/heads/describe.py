"""What a model is, from its config and from the shapes that its attention sites computed with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from headscope.capture.session import SiteFacts
from headscope.heads.statistics import Layer
from headscope.models.loading import LoadedModel
from headscope.models.text_config import text_config
from headscope.results import ModelInfo, Stack


def model_info(loaded: LoadedModel, facts: Mapping[Layer, SiteFacts]) -> ModelInfo:
    """What the model is, its sizes read from the shapes that its sites computed with."""
    stacks: dict[str, list[SiteFacts]] = {}
    for (name, _), fact in facts.items():
        stacks.setdefault(name, []).append(fact)
    config = text_config(loaded.model)
    hidden = getattr(config, "hidden_size", None)
    return ModelInfo(
        name=loaded.name,
        type=loaded.model.config.model_type,
        class_name=type(loaded.model).__name__,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=str(loaded.model.device),
        num_layers=_same(_depth(loaded.model, name, members) for name, members in stacks.items()),
        num_heads=_same(f.num_heads for f in facts.values()),
        num_kv_heads=_same(f.num_kv_heads for f in facts.values()),
        head_dim=_same(f.head_dim or _head_dim(f, hidden) for f in facts.values()),
        hidden_size=hidden if isinstance(hidden, int) else None,
        stacks=tuple(
            Stack(name, tuple(f.site.layer for f in members), tuple(f.num_heads for f in members))
            for name, members in stacks.items()
        ),
    )


def _depth(model: PreTrainedModel, stack: str, members: Sequence[SiteFacts]) -> int:
    """Layers of a stack; a hybrid's only stack counts those without attention too."""
    total = getattr(model.config, "num_hidden_layers", None)
    last = max(f.site.layer for f in members)
    return total if stack == "self" and isinstance(total, int) and total > last else len(members)


def _head_dim(fact: SiteFacts, hidden: Any) -> int | None:
    known = getattr(fact.site.module, "head_dim", None)
    if isinstance(known, int):
        return known
    return hidden // fact.num_heads if isinstance(hidden, int) and hidden % fact.num_heads == 0 else None


def _same(values: Iterable[int | None]) -> int | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
