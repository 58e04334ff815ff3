"""What a model is, from its config and its weights, without running it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from headscope.errors import ModelError
from headscope.models.loading import LoadedModel
from headscope.models.projections import Projections, projections, state_of
from headscope.models.sites import Site, find_sites
from headscope.models.text_config import text_config
from headscope.results import ModelInfo, Stack


def located(model: PreTrainedModel) -> list[tuple[Site, Projections | None]]:
    """All sites with their projections; None where those are not plain."""
    found: list[tuple[Site, Projections | None]] = []
    for site in find_sites(model):
        try:
            found.append((site, projections(site, model=model)))
        except ModelError:
            found.append((site, None))
    return found


def describe(loaded: LoadedModel) -> ModelInfo:
    """What a model is; heads are those of the original, layers those whose heads can be told apart."""
    model = loaded.model
    states = [(site, state_of(site, found)) for site, found in located(model) if found is not None]
    stacks: dict[str, list[tuple[int, int]]] = {}
    for site, state in states:
        stacks.setdefault(site.stack, []).append((site.layer, state.num_heads))
    hidden = getattr(text_config(model), "hidden_size", None)
    depth = getattr(model.config, "num_hidden_layers", None)
    return ModelInfo(
        name=loaded.name,
        type=model.config.model_type,
        class_name=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        num_layers=depth if list(stacks) == ["self"] else _same([len(layers) for layers in stacks.values()]),
        num_heads=_same([state.num_heads for _, state in states]),
        num_kv_heads=_same([state.num_kv_heads for _, state in states]),
        head_dim=_same([state.head_dim for _, state in states]),
        hidden_size=hidden if isinstance(hidden, int) else None,
        stacks=tuple(Stack(n, tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)) for n, pairs in stacks.items()),
    )


def _same(values: Sequence[int]) -> int | None:
    return values[0] if len(set(values)) == 1 else None
