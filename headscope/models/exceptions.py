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

# Classes whose learned sink scales what attention gives and leaves the weights that they return alone, by name.
SINKS_SCALE_CONTEXT = {"GraniteSWAAttention", "GraniteMoeSWAAttention"}

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

# Classes whose heads cannot be removed although their projections are plain, by name (with the file's where names are
# not enough), with what they do.
_WIDTH_OF_INPUT = "its code takes the width of all heads together from its input"
NOT_PRUNABLE = {
    "AutoformerAttention": "it chooses delays by the mean over all heads",
    "LiltSelfAttention": "its heads share their scores with those of the layout beside them",
    "LongT5LocalAttention": "its bias is laid out in blocks of tokens, for all original heads",
    "LongT5TransientGlobalAttention": "its bias is laid out in blocks of tokens, for all original heads",
    "LEDEncoderSelfAttention": "its code takes the width of its input from that of all heads together",
    "LongformerSelfAttention": "its code takes the width of its input from that of all heads together",
    "ProphetNetNgramSelfAttention": "its relative positions are projected for all heads at once",
} | dict.fromkeys(
    (
        "BlipAttention",
        "Blip2Attention",
        "InstructBlipAttention",
        "InstructBlipVideoAttention",
        "DetrAttention",
        "Florence2VisionWindowAttention",
        "modeling_fsmt.Attention",
        "GroupViTAttention",
        "LEDDecoderAttention",
        "Mask2FormerAttention",
        "MgpstrAttention",
        "OneFormerAttention",
        "PegasusXGlobalLocalAttention",
        "ProphetNetAttention",
        "PvtV2SelfAttention",
        "TableTransformerAttention",
        "TimesformerSelfAttention",
        "TrOCRAttention",
    ),
    _WIDTH_OF_INPUT,
)

# Attributes that are true of attention modules whose keys and values serve other layers, too.
SHARES_KEYS = ("is_kv_shared_layer", "store_full_length_kv")

# Classes that repeat keys and values for each query head before they are cached, by name; with one for all they do not.
CACHES_EVERY_HEAD = {"FalconAttention"}

# Classes whose masks have a row of their own for each head, by name.
PER_HEAD_MASKS = {
    "EomtAttention",
    "EomtDinov3Attention",
    "GroundingDinoMultiheadAttention",
    "MMGroundingDinoMultiheadAttention",
    "Phi4MultimodalAudioAttention",
    "Sam3Attention",
    "Sam3LiteTextAttention",
}

# Classes whose `position_bias` is for tokens and features, not for heads, by name.
BIAS_WITHOUT_HEADS = {"SpeechT5Attention"}

# Types whose config wants its width to be a multiple of its heads, and the class that is the same without.
SAME_WITHOUT_WIDTH_CHECK = {"llama": "Mistral"}
