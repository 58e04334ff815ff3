"""The rows of a model that could be built without values: one a stack."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from headscope.models.describe import located
from headscope.models.sites import Site
from headscope.models.text_config import text_config
from headscope.sizing.asked import Asked
from headscope.sizing.counting import Located, is_indexer, keeps_keys, latent_width, layer_sizes, repeats_keys
from headscope.sizing.lengths import own_length
from headscope.sizing.result import LayerSize, StackSize, window_note

_MEDIA = ("vision", "audio")


def model_rows(name: str, model: PreTrainedModel, asked: Asked) -> list[StackSize]:
    """A row for each stack of attention layers of a model, with values or without.

    Raises:
        ModelError: The model has no attention.
    """
    stacks: dict[str, list[Located]] = {}
    for site, found in located(model):
        stacks.setdefault(site.stack, []).append((site, found))
    text = any(site.query_axis not in _MEDIA for sites in stacks.values() for site, _ in sites)
    total = model.num_parameters()
    return [_row(name, model, stack, sites, asked, total, text) for stack, sites in stacks.items()]


def _row(
    name: str,
    model: PreTrainedModel,
    stack: str,
    sites: list[Located],
    asked: Asked,
    total: int,
    has_text: bool,
) -> StackSize:
    site = sites[0][0]
    keeps_cache = any(keeps_keys(model, s) for s, _ in sites)
    layers = layer_sizes(model, sites, keeps_cache)
    length = _length(model, site, site.query_axis, asked, has_text)
    keys = length if not site.cross else _length(model, site, site.key_axis, asked, has_text)
    dtype, width = asked.dtype_of(model.config)
    depth = getattr(text_config(model), "num_hidden_layers", None)
    return StackSize(
        name=name,
        stack=stack,
        kind=f"{type(model).__name__} ({model.config.model_type})",
        hidden_size=_hidden_size(sites, model),
        num_layers=depth if stack in ("self", "text") and isinstance(depth, int) else len(layers),
        layers=layers,
        total_params=total or None,
        length=length,
        key_length=keys,
        dtype=dtype,
        dtype_bytes=width,
        batch_size=asked.batch_size,
        keeps_cache=keeps_cache,
        cross=site.cross,
        source="projections",
        notes=tuple(_notes(model, sites, layers, length, keeps_cache)),
    )


def _length(model: PreTrainedModel, site: Site, axis: str, asked: Asked, has_text: bool) -> int | None:
    if asked.length is not None and not (has_text and axis in _MEDIA):
        return asked.length
    return None if axis == "other" and site.cross else own_length(model, site, axis)


def _hidden_size(sites: list[Located], model: PreTrainedModel) -> int | None:
    found = next((found for _, found in sites if found is not None), None)
    if found is not None:
        return int(found.query.matrix().shape[1])
    size = getattr(text_config(model), "hidden_size", None)
    return size if isinstance(size, int) else None


# ------------------------------------------------------------------ what the numbers mean
def _notes(
    model: PreTrainedModel, sites: list[Located], layers: Sequence[LayerSize], length: int | None, keeps_cache: bool
) -> list[str]:
    site = sites[0][0]
    notes = []
    own = None if length is None else own_length(model, site, site.query_axis)
    if own is not None and length is not None and length > own:
        notes.append(f"{length:,} tokens are more than the model's own {own:,}")
    if any(layer.repeated for layer in layers):
        notes.append("layers share weights, which are counted once")
    if any(found is not None and found.gate is not None for _, found in sites):
        notes.append("weights that make a gate for each head count with the queries")
    if any(found is not None and found.output is None for _, found in sites):
        notes.append("no output projection was found beside its attention")
    return notes + _kinds(sites) + (_cache_notes(model, sites, layers) if keeps_cache else [])


def _kinds(sites: list[Located]) -> list[str]:
    strange = [site.module for site, found in sites if found is None]
    notes = []
    if any(latent_width(module) for module in strange):
        notes.append("latent attention: keys and values are made from one narrow vector a token, and only that is kept")
    names = ", ".join(sorted({type(module).__name__ for module in strange if not latent_width(module)}))
    if names:
        notes.append(f"{names}: not plain projections, so all matrices inside are counted")
    if any(is_indexer(name) for module in strange for name, _ in module.named_children()):
        notes.append("what chooses keys beforehand is not counted, neither its weights nor what it keeps")
    return notes


def _cache_notes(model: PreTrainedModel, sites: list[Located], layers: Sequence[LayerSize]) -> list[str]:
    if sites[0][0].cross:
        return ["the cache of cross-attention holds the other sequence and does not grow while text is written"]
    notes = []
    if any(layer.cached is None for layer in layers):
        notes.append("what it keeps for each token cannot be told from shapes")
    if any(layer.window for layer in layers):
        notes.append(window_note([layer.window for layer in layers]))
    if any(repeats_keys(site, found) for site, found in sites):
        notes.append("its code keeps keys and values once for every query head, although heads share them")
    idle = sum(1 for layer in layers if layer.cached == 0)
    if idle:
        notes.append(f"{idle} of {len(layers)} layers keep nothing: they read what others keep")
    depth = getattr(text_config(model), "num_hidden_layers", None)
    if isinstance(depth, int) and depth > len(layers):
        notes.append(f"{depth - len(layers)} of {depth} layers are not attention; what those keep is not counted")
    return notes
