"""What cannot be removed is refused with its reason before anything changes."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3Model, Gemma3nTextConfig, Olmo2Config, Olmo2ForCausalLM

import headscope
from fixtures.building import build_family
from headscope.errors import HeadscopeError, InputError
from headscope.models.parts import NotPlain
from headscope.pruning.plan import make_plan

TINY = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
}


@pytest.fixture
def bert():
    return build_family("bert")


@pytest.fixture
def llama():
    """Eight query heads, two key-value heads."""
    return build_family("llama")


def unchanged_by(model, heads, **options) -> HeadscopeError:
    """The error of a bad request, after which nothing is different."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    config, numbers = model.config.to_json_string(), _numbers(model)
    with pytest.raises(HeadscopeError) as caught:
        headscope.prune_heads(model, heads, **options)
    assert model.config.to_json_string() == config and not hasattr(model.config, "headscope")
    assert _numbers(model) == numbers
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[k], v) for k, v in state.items())
    return caught.value


def _numbers(model: nn.Module) -> list:
    return [{k: v for k, v in vars(m).items() if isinstance(v, int)} for m in model.modules()]


@pytest.mark.parametrize(
    ("heads", "message", "hint"),
    [
        ("0:4", "head 4 does not exist in layer 0 of self: its heads are 0-3", "original model"),
        ({0: [4]}, "head 4 does not exist in layer 0 of self: its heads are 0-3", "original model"),
        ({0: [-1]}, "head -1 does not exist in layer 0 of self: its heads are 0-3", "original model"),
        ("0:2-9", "head 9 does not exist in layer 0 of self: its heads are 0-3", "original model"),
        ("0:1;9:0", "layer 9 does not exist in this model: its layers are 0-2", "layers 0-2, heads 0-3"),
        ({-1: [0]}, "layer -1 does not exist in this model: its layers are 0-2", "layers 0-2, heads 0-3"),
        ("encoder.0:1", "stack 'encoder' does not exist in this model", "layers 0-2, heads 0-3"),
        ({"a": [0]}, "cannot read the layer 'a'", "layers 0-2, heads 0-3"),
        ({0: []}, "no heads are given for layer 0", "layers 0-2, heads 0-3"),
        ({0: [True]}, "cannot read the head True of layer 0", "layers 0-2"),
        ({0: ["x"]}, "cannot read the head 'x' of layer 0", "layers 0-2"),
        ("x", "cannot read 'x' in --heads", "layers 0-2, heads 0-3"),
        ("1:0;0:all", "self.0 would lose all of its 4 heads", "--allow-empty"),
    ],
)
def test_bad_requests_name_what_is_valid_and_change_nothing(bert, heads, message: str, hint: str) -> None:
    error = unchanged_by(bert, heads)
    assert isinstance(error, InputError) and message in error.message and hint in (error.hint or "")


def test_reads_numbers_of_any_library_and_text_keys(bert) -> None:
    report = headscope.prune_heads(bert, {np.int64(0): np.array([1, 3]), "1": {0}, "self.2": [2]})
    assert report.heads == {"self.0": (1, 3), "self.1": (0,), "self.2": (2,)}


def test_several_stacks_need_their_names() -> None:
    model = build_family("t5")
    error = unchanged_by(model, {0: [1]})
    assert error.message == "layer 0 could be in any of the stacks encoder, decoder, cross"
    assert "cross: layers 0-1, heads 0-3" in (error.hint or "")


def test_names_heads_once(bert) -> None:
    report = headscope.prune_heads(bert, "0:1,1;0:1-2")
    assert report.heads == {"self.0": (1, 2)}
    assert report.notes == ("self.0: head 1 is named more than once and taken once",)


# ------------------------------------------------------------------ grouped queries
def test_uneven_groups_are_refused_with_the_nearest_plans(llama) -> None:
    error = unchanged_by(llama, "0:0")
    assert "unequally many query heads: 3, 4" in error.message
    assert "self.0:0-3 (whole groups)" in (error.hint or "")
    assert "self.0:0,4 (as many from every group)" in (error.hint or "")
    for plan in ("self.0:0-3", "self.0:0,4"):
        assert make_plan(llama, plan).modules


def test_what_cannot_leave_is_zeroed_where_asked(llama) -> None:
    before = llama.num_parameters()
    report = headscope.prune_heads(llama, "0:0;1:0,1,4", ragged="mask")
    assert report.heads == {"self.0": (0,), "self.1": (0, 1, 4)}
    assert report.zeroed == {"self.0": (0,), "self.1": (0,)}
    attention = llama.model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (64, 32) and not attention.o_proj.weight[:, :8].any()
    # One of each group left the second layer: its queries and outputs are two heads narrower.
    assert before - llama.num_parameters() == 2 * 2 * 8 * 32
    assert any("saves no parameters" in note for note in report.notes)


def test_a_whole_group_takes_its_keys_along(llama) -> None:
    headscope.prune_heads(llama, "0:4-7")
    attention = llama.model.layers[0].self_attn
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (8, 32)
    assert attention.num_key_value_groups == 4
    cache = llama(torch.arange(10, 16)[None], use_cache=True).past_key_values
    assert [layer.keys.shape[1] for layer in cache.layers] == [1, 2, 2]


def test_keys_that_all_heads_share_stay() -> None:
    model = build_family("falcon_mqa")
    headscope.prune_heads(model, "0:0,2,3")
    attention = model.transformer.h[0].self_attention
    assert attention.query_key_value.weight.shape == (8 + 2 * 8, 32) and attention.num_heads == 1


@pytest.mark.parametrize("value", ["mask it", "", None])
def test_ragged_is_one_of_two_words(llama, value) -> None:
    assert "ragged is" in unchanged_by(llama, "0:0", ragged=value).message


# ------------------------------------------------------------------ shared modules
def test_layers_that_share_a_module_lose_their_union() -> None:
    model = build_family("albert")
    report = headscope.prune_heads(model, "0:1;1:2")
    assert report.heads == dict.fromkeys(("self.0", "self.1", "self.2"), (1, 2))
    assert report.notes == ("self.0 and self.1 and self.2 share one module: head 1-2 leaves all of them",)
    assert model.encoder.albert_layer_groups[0].albert_layers[0].attention.query.weight.shape == (16, 32)
    assert headscope.prune_heads(model, "2:1").notes[0].endswith("head 1 was removed already")


# ------------------------------------------------------------------ modules that cannot be cut
class Quantised(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).round()


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.down, self.up = base, nn.Linear(32, 2), nn.Linear(2, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def test_adapters_and_quantised_projections_are_refused(bert) -> None:
    attention = bert.encoder.layer[1].attention
    attention.self.query = LowRank(attention.self.query)
    error = unchanged_by(bert, "0:0;1:1")
    assert isinstance(error, NotPlain) and "Merge the adapter" in (error.hint or "")
    attention.self.query = Quantised(32, 32)
    error = unchanged_by(bert, "0:0;1:1")
    assert isinstance(error, NotPlain) and "unquantised" in (error.hint or "")
    assert headscope.prune_heads(bert, "0:0").heads == {"self.0": (0,)}


def test_tied_projections_are_refused(bert) -> None:
    first, second = (layer.attention.self for layer in bert.encoder.layer[:2])
    second.query.weight = first.query.weight
    assert "shares its weight with other modules" in unchanged_by(bert, "0:0").message


def test_a_norm_over_all_heads_is_refused() -> None:
    model = Olmo2ForCausalLM(Olmo2Config(**TINY))
    error = unchanged_by(model, "0:0")
    assert isinstance(error, NotPlain) and "q_norm.weight is a norm over all heads together" in error.message


def test_latent_attention_is_refused() -> None:
    config = DeepseekV3Config(
        **TINY, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=2,
        num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=8, n_shared_experts=1,
    )  # fmt: skip
    assert "multi-head latent attention" in unchanged_by(DeepseekV3Model(config), "0:0").message


def test_state_that_is_not_known_is_refused(bert) -> None:
    bert.encoder.layer[0].attention.self.head_scale = nn.Parameter(torch.ones(4))
    error = unchanged_by(bert, "0:0")
    assert "head_scale of shape (4,) may belong to single heads" in error.message


def test_keys_that_serve_other_layers_are_refused() -> None:
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextModel

    config = Gemma3nTextConfig(
        **TINY | {"num_hidden_layers": 4, "intermediate_size": [48] * 4}, head_dim=8, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=8, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    assert "serve several layers" in unchanged_by(Gemma3nTextModel(config), "0:0").message


def test_a_layer_without_heads_of_its_own_leaves_others_alone() -> None:
    model = deepcopy(build_family("jamba"))
    assert headscope.prune_heads(model, "3:0,1").heads == {"self.3": (0, 1)}
    with pytest.raises(InputError, match="layer 0 does not exist in this model: its layers are 1,3"):
        headscope.prune_heads(model, "0:0")
