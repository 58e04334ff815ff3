"""True exceptions, keyed by `config.model_type`. Everything else is recognised by what its modules have."""

from __future__ import annotations

from headscope.models.layouts import BY_KV_HEAD, Arrangement

# Types whose layers share attention modules: the config attribute that says how many layers there are in one forward
# pass. Layers of such a type are the calls of its modules, in order.
SHARED_LAYERS = {"albert": "num_hidden_layers"}

# Types whose modules return weights in another order than (batch, head, query, key): where to find each of these axes.
WEIGHT_AXES: dict[str, tuple[int, int, int, int]] = {"xlnet": (2, 3, 0, 1)}

# Classes whose rows are not the tokens in their order, by name, with what they do.
ROWS_ARE_NOT_TOKENS = {
    "InformerProbSparseAttention": "attends from tokens that it picks, in no order",
    "Florence2VisionChannelAttention": "attends between channels, not between tokens",
}

# Types whose fused projection is arranged otherwise than its names say, or whose names do not say.
ARRANGEMENTS = {
    "gpt_bigcode": BY_KV_HEAD,
    # Four runs, as its weights were cut for four tensor-parallel devices, with values before keys.
    "codegen": Arrangement(4, ("query", "value", "key")),
}

# Types whose queries, keys or values are more than a projection of the input, with what they are.
NOT_PLAIN = {
    "diffllama": "differential attention, whose values are shared between pairs of heads",
    "neomme": "embeddings of the tokens are added to its values",
}

# What children of an attention module change its queries, keys or values with, by a piece of their names.
NOT_PLAIN_CHILDREN = {
    "adapter": "adapters are added to its projections",
    "sconv": "its keys and values run through a convolution over tokens",
}

# Classes that compute what torch's Linear does and say so in their own words, by name: themselves a Linear, or around
# one named `linear`.
PLAIN_LINEARS = {"FalconLinear"}
PLAIN_WRAPPERS = {"MoshiLinear", "KyutaiSpeechToTextLinear", "Gemma4ClippableLinear"}
