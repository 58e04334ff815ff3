"""Every fixture family, end to end, against plain NumPy on transformers' own `output_attentions`."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import headscope
from fixtures.building import build_family, example_inputs, real_lengths, reference_attentions
from fixtures.families import FAMILIES, HIDDEN
from fixtures.tokenizers import build_tokenizer
from headscope.errors import ModelError
from tests.judging import compare, judged_names, judges_of, special_of

ATTENTIVE = [name for name, family in FAMILIES.items() if family.stacks]
ONE_TEXT = [name for name in ATTENTIVE if FAMILIES[name].modality == "text"]


def tokenizer_of(family) -> PreTrainedTokenizerBase | None:
    return build_tokenizer(family.tokenizer) if family.tokenizer else None


def inputs_of(family, tokenizer):
    """The family's example with a special token in front of each text, where there is one."""
    inputs = example_inputs(family)
    if tokenizer is not None:
        known = [n for n in tokenizer.all_special_ids if n not in (tokenizer.pad_token_id, tokenizer.unk_token_id)]
        inputs["input_ids"][:, 0] = (known or tokenizer.all_special_ids)[0]
    return inputs


def judged(name, model=None):
    """(model, inputs, tokenizer, judges by (stack, layer, head)) of a family."""
    family = FAMILIES[name]
    model, tokenizer = model or build_family(name), tokenizer_of(family)
    inputs = inputs_of(family, tokenizer)
    attentions = reference_attentions(family, model, inputs)
    keys = {stack: next(iter(layers.values())).shape[3] for stack, layers in attentions.items()}
    special_ids = known_special(model, tokenizer)
    special = special_of(family, inputs, special_ids, keys)
    return model, inputs, tokenizer, judges_of(family, attentions, real_lengths(family, inputs), special)


def known_special(model, tokenizer):
    if tokenizer is not None:
        return [n for n in tokenizer.all_special_ids if n != tokenizer.unk_token_id or n == tokenizer.eos_token_id]
    config = model.config.get_text_config()
    return [n for n in (getattr(config, f"{r}_token_id", None) for r in ("bos", "eos", "pad")) if n is not None]


@pytest.mark.parametrize("name", ATTENTIVE)
def test_every_metric_of_every_head_equals_plain_numpy(name):
    model, inputs, tokenizer, judges = judged(name)
    before = {key: value.clone() for key, value in inputs.items()}
    for rules in ("seed", "calibrated"):
        result = headscope.analyze(
            model, inputs=inputs, tokenizer=tokenizer, metrics=",".join(judged_names()), rules=rules
        )
        compare(result, judges, judged_names())
    assert all(torch.equal(inputs[key], before[key]) for key in inputs)
    stacks = {stack.name: stack for stack in result.model.stacks}
    assert set(stacks) == set(FAMILIES[name].stacks)
    for stack, spec in FAMILIES[name].stacks.items():
        assert stacks[stack].layers == spec.layers
        assert set(stacks[stack].num_heads) == {spec.num_heads}
        group = spec.num_heads // spec.num_kv_heads
        assert all(h.kv_head == h.head // group for h in result.heads if h.stack == stack)
    check_model(result.model, model, FAMILIES[name])
    unseen = [line for line in result.warnings if "do not sum to one" in line]
    assert bool(unseen) == any(not spec.sums_to_one for spec in FAMILIES[name].stacks.values())
    assert not [line for line in result.warnings if "above the diagonal" in line or "left out" in line]


def check_model(info, model, family):
    """Sizes are None where stacks differ; a hybrid's layers without attention count as layers."""
    specs = list(family.stacks.values())
    depth = {model.config.num_hidden_layers} if list(family.stacks) == ["self"] else {len(s.layers) for s in specs}
    assert info.num_layers == (depth.pop() if len(depth) == 1 else None)
    assert (info.num_heads, info.num_kv_heads) == (specs[0].num_heads, specs[0].num_kv_heads)
    assert info.hidden_size in (HIDDEN, None) and info.type == model.config.model_type
    assert info.head_dim == family.config.get("head_dim", HIDDEN // specs[0].num_heads)
    assert (info.dtype, info.device, info.class_name) == ("float32", "cpu", family.model_class)


def test_a_model_without_attention_is_told_apart():
    with pytest.raises(ModelError, match="MambaForCausalLM has no attention"):
        headscope.analyze(build_family("mamba"), ids=[11, 12, 13])
