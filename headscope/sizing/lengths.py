"""How many tokens a stack reads when nobody says: the model's own limit, or what its images or sounds come to."""

from __future__ import annotations

import math
import re
from typing import Any

from transformers import PreTrainedModel

from headscope.models.limits import decoder_limit, text_limit
from headscope.models.sites import Site

# Where a model has no limit.
DEFAULT_LENGTH = 2048

# Tokens that image models put before the patches, by the name of their parameter.
_EXTRA_TOKENS = re.compile(r"(^|\.)(cls_token|class_token|class_embedding|distillation_token|register_tokens)$")
# Towers whose layers look within windows, or whose numbers of tokens differ from layer to layer, say so.
_NOT_ONE_LENGTH = ("window_size", "depths", "hidden_sizes")


def own_length(model: PreTrainedModel, site: Site, axis: str) -> int | None:
    """Tokens on an axis of a site by what the model says.

    Args:
        axis: `site.query_axis` or `site.key_axis`.

    Returns:
        None for images and sounds whose number of tokens the config does not tell; `DEFAULT_LENGTH` for text without
        a limit.
    """
    if axis == "vision":
        return _image_tokens(model, getattr(site.module, "config", None) or model.config)
    if axis == "audio":
        return _number(getattr(site.module, "config", None) or model.config, "max_source_positions")
    limit = decoder_limit(model) if axis == "decoder" else text_limit(model, None)
    return limit or _number(getattr(site.module, "config", None), "max_position_embeddings") or DEFAULT_LENGTH


def _image_tokens(model: PreTrainedModel, config: Any) -> int | None:
    """Patches of an image, (height / patch) × (width / patch), and the tokens that are put before them."""
    image, patch = _pair(getattr(config, "image_size", None)), _pair(getattr(config, "patch_size", None))
    if image is None or patch is None or any(getattr(config, name, None) for name in _NOT_ONE_LENGTH):
        return None
    patches = (image[0] // patch[0]) * (image[1] // patch[1])
    extra = [p.shape for name, p in model.named_parameters() if _EXTRA_TOKENS.search(name)]
    return patches + sum(math.prod(shape[:-1]) for shape in extra)


def _pair(value: Any) -> tuple[int, int] | None:
    sizes = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    return (sizes[0], sizes[1]) if len(sizes) == 2 and all(isinstance(s, int) and s > 0 for s in sizes) else None


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None
