"""What is not a plain projection is refused with its reason, and nothing is written that does not fit."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import DeepseekV3Config, DeepseekV3Model, DiffLlamaConfig, DiffLlamaModel
from weight_cases import BERT, site_of

from headscope.errors import InputError, ModelError
from headscope.models.sites import find_sites
from headscope.models.weights import NotPlain, head_shape, projections, read_weights, write_weights


def attention(**changed: object) -> nn.Module:
    """Two heads of three with everything plain; `changed` replaces children or attributes."""
    module = nn.Module()
    module.head_dim, module.num_heads = 3, 2
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(module, name, nn.Linear(5, 6))
    module.o_proj = nn.Linear(6, 5)
    for name, value in changed.items():
        setattr(module, name, value)
    return module


class Quantised(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).round()


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(5, 6)


class Integers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 6)
        self.weight = nn.Parameter(torch.zeros(6, 5, dtype=torch.int8), requires_grad=False)


class Wrapped(torch.Tensor):
    """A tensor subclass, as quantised and distributed weights are."""


def with_tensor_subclass() -> nn.Linear:
    layer = nn.Linear(5, 6)
    layer._parameters["weight"] = nn.Parameter(layer.weight.detach().as_subclass(Wrapped))
    return layer


def parametrised() -> nn.Linear:
    layer = nn.Linear(5, 6)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


REFUSED = {
    "a subclass that does more": (Quantised(5, 6), "more than a linear map"),
    "an adapter": (Adapter(), "an adapter"),
    "integers": (Integers(), "int8"),
    "eight bits": (nn.Linear(5, 6).to(torch.float8_e4m3fn), "float8"),
    "a tensor subclass": (with_tensor_subclass(), "Wrapped"),
    "a computed weight": (parametrised(), "not a linear map|more than a linear map"),
    "a wide kernel": (nn.Conv1d(5, 6, kernel_size=3), "not a linear map"),
    "a grouped kernel": (nn.Conv1d(6, 6, kernel_size=1, groups=2), "not a linear map"),
    "left out": (None, "left out"),
}


@pytest.mark.parametrize(("layer", "reason"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_projection_that_is_not_plain_is_refused(name, layer, reason):
    module = attention(**{name: layer})
    with pytest.raises(NotPlain, match=reason) as caught:
        read_weights(site_of(module))
    assert f"attention.{name}" in caught.value.message and caught.value.exit_code == 3


def test_a_plain_one_is_not():
    kernel = nn.Conv1d(5, 6, kernel_size=1)
    read = read_weights(site_of(attention(q_proj=kernel, o_proj=nn.Sequential(nn.Linear(6, 5), nn.Dropout()))))
    assert torch.equal(read.query, kernel.weight.view(2, 3, 5)) and read.output.shape == (2, 3, 5)


@pytest.mark.parametrize(
    ("model_class", "config", "reason"),
    [
        (
            DeepseekV3Model,
            DeepseekV3Config(
                **BERT,
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_nope_head_dim=8,
                qk_rope_head_dim=4,
                v_head_dim=8,
                first_k_dense_replace=2,
            ),
            "multi-head latent attention",
        ),
        (DiffLlamaModel, DiffLlamaConfig(**BERT, num_key_value_heads=4), "differential attention"),
    ],
)
def test_attention_without_plain_heads_says_what_it_is(model_class, config, reason):
    sites = find_sites(model_class(config))
    assert sites
    for site in sites:
        with pytest.raises(NotPlain, match=reason):
            read_weights(site)


def test_children_that_change_the_projections_are_refused():
    with pytest.raises(NotPlain, match="adapters are added"):
        read_weights(site_of(attention(linear_q_adapter_list=nn.ModuleList([nn.Linear(5, 6)]))))
    assert read_weights(site_of(attention(linear_q_adapter_list=nn.ModuleList([nn.Identity()])))).query.shape[0] == 2


def test_the_module_of_torch_and_unknown_names_say_so():
    with pytest.raises(NotPlain, match="MultiheadAttention"):
        head_shape(site_of(nn.MultiheadAttention(8, 2)))
    module = nn.Module()
    module.alpha = nn.Linear(2, 2)
    with pytest.raises(NotPlain, match=r"not in the layout table \(it has: alpha\)"):
        head_shape(site_of(module))


def test_an_unknown_order_is_refused():
    module = nn.Module()
    module.head_dim, module.config = 3, SimpleNamespace(model_type="unheard-of")
    module.qkv_proj, module.out_proj = nn.Linear(5, 18), nn.Linear(6, 5)
    with pytest.raises(NotPlain, match="an order that is not known"):
        projections(site_of(module))


def test_two_biases_are_refused():
    module = nn.Module()
    module.num_heads, module.in_proj, module.q_bias = 2, nn.Linear(5, 18), nn.Parameter(torch.zeros(6))
    with pytest.raises(NotPlain, match="two biases"):
        projections(site_of(module))


INCONSISTENT = {
    "heads": ({"num_heads": 3}, "num_heads = 3, its weights have 2"),
    "kv heads": ({"num_key_value_heads": 1}, "num_kv_heads = 1, its weights have 2"),
    "head size": ({"head_dim": 4}, "cannot be cut into pieces of 4"),
    "output": ({"o_proj": nn.Linear(9, 5)}, "its output projection 3"),
    "keys": ({"k_proj": nn.Linear(5, 12), "v_proj": nn.Linear(5, 12)}, "cannot share 4 key-value heads"),
    "nothing said": ({"head_dim": None, "num_heads": None}, "says how many heads"),
}


@pytest.mark.parametrize(("changed", "reason"), INCONSISTENT.values(), ids=INCONSISTENT.keys())
def test_heads_that_do_not_fit_the_weights_are_an_error(changed, reason):
    with pytest.raises(ModelError, match=reason):
        head_shape(site_of(attention(**changed)))


def test_heads_come_from_the_module_then_from_its_config():
    for config in ({"head_dim": 3}, {"num_attention_heads": 2}):
        module = attention(head_dim=None, num_heads=None, config=SimpleNamespace(**config))
        assert head_shape(site_of(module)).num_heads == 2


def test_a_config_that_refuses_to_answer_is_passed_over():
    class Varied:
        """As configs whose layers differ."""

        model_type = "varied"

        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"{name} differs between layers")

    assert head_shape(site_of(attention(num_heads=None, config=Varied()))).num_heads == 2


def test_what_does_not_fit_is_not_written():
    site = site_of(attention())
    weights = read_weights(site).clone()
    before = deepcopy(site.module.state_dict())
    longer = torch.zeros(2, 4, 5)
    for broken in (
        replace(weights, query=longer),
        replace(weights, query_bias=None),
        replace(weights, output=None),
        replace(weights, output_bias=torch.zeros(6)),
        replace(weights, gate=torch.zeros(2, 3, 5)),
    ):
        changed = replace(broken, key=weights.key + 1)
        with pytest.raises(InputError, match="attention needs"):
            write_weights(site, changed)
    assert all(torch.equal(value, before[key]) for key, value in site.module.state_dict().items())


def test_tensors_that_are_views_of_one_another_are_written_whole():
    site = site_of(attention())
    weights = read_weights(site)
    key, value = weights.key.clone(), weights.value.clone()
    write_weights(site, replace(weights, key=weights.value, value=weights.key))
    swapped = read_weights(site)
    assert torch.equal(swapped.key, value) and torch.equal(swapped.value, key)


def test_weights_elsewhere_have_places_but_no_values():
    site = site_of(attention().to("meta"))
    assert projections(site).query.rows.index().tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ModelError, match="not in memory"):
        read_weights(site)


def test_an_output_outside_is_found_with_the_model_only():
    model = nn.Module()
    model.attention, model.output = attention(), nn.Module()
    del model.attention.o_proj
    model.output.dense = nn.Linear(6, 5)
    site = replace(site_of(model.attention), path="attention")
    assert read_weights(site).output is None
    assert torch.equal(read_weights(site, model=model).output, model.output.dense.weight.T.view(2, 3, 5))
    model.intermediate = nn.Linear(5, 6)
    assert read_weights(site, model=model).output is None
    del model.intermediate
    model.output.dense = nn.Linear(7, 5)
    assert read_weights(site, model=model).output is None
    model.output.dense = Quantised(6, 5)
    with pytest.raises(NotPlain, match=r"output\.dense"):
        read_weights(site, model=model)
