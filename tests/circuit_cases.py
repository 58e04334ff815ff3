"""Tiny models whose heads' weights are known, for tests of what weights say."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import transformers

from fixtures import circuits
from headscope.heads.catalogue.probing import Probing
from headscope.models.loading import wrap_model
from headscope.models.selection import parse_selection
from headscope.models.sites import find_sites

VOCAB, SIZE, HEADS, WIDTH = 97, 32, 4, 8
PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
}
GROUPED = PLAIN | {"num_key_value_heads": 2, "head_dim": WIDTH}
CONFIGS = {
    "GPT2LMHeadModel": {"vocab_size": VOCAB, "n_embd": SIZE, "n_layer": 3, "n_head": HEADS, "n_positions": 64},
    "LlamaForCausalLM": GROUPED,
    "Gemma2ForCausalLM": GROUPED,
    "BloomForCausalLM": {"vocab_size": VOCAB, "hidden_size": SIZE, "n_layer": 3, "n_head": HEADS},
    "BertForMaskedLM": PLAIN,
    "BertModel": PLAIN,
    "BitNetForCausalLM": GROUPED,
}


def random_model(name):
    """A tiny model whose norms' gains and biases are far from one and zero, and whose output embedding is its own."""
    kind = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class(**CONFIGS[name], tie_word_embeddings=False, attn_implementation="eager")).eval()
        for parameter in model.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


built = cache(random_model)
circuit = cache(circuits.induction_model)


def probing(model, heads=None, **options):
    sites = find_sites(model)
    return Probing(wrap_model(model), sites, sites, parse_selection("head", heads), **options)


def array(tensor):
    return tensor.detach().double().numpy()


def head_weights(model, layer, head):
    """Query, key, value (width, SIZE), output (SIZE, width) of one head, cut out of the model's own parameters."""
    own = slice(head * WIDTH, (head + 1) * WIDTH)
    if model.config.model_type == "gpt2":
        block = model.transformer.h[layer].attn
        parts = [array(block.c_attn.weight)[:, i * SIZE : (i + 1) * SIZE][:, own].T for i in range(3)]
        return *parts, array(block.c_proj.weight)[own].T
    if model.config.model_type == "bloom":
        block = model.transformer.h[layer].self_attention
        fused = array(block.query_key_value.weight).reshape(HEADS, 3, WIDTH, SIZE)[head]
        return *fused, array(block.dense.weight)[:, own]
    block = model.model.layers[layer].self_attn
    group = slice(head // 2 * WIDTH, (head // 2 + 1) * WIDTH)
    key, value = (array(p.weight)[group] for p in (block.k_proj, block.v_proj))
    return array(block.q_proj.weight)[own], key, value, array(block.o_proj.weight)[:, own]


def norms(model, layer):
    """As matrices: the norm before a layer, the one behind its attention, and the last one."""
    centre = np.eye(SIZE) - 1 / SIZE
    match model.config.model_type:
        case "gpt2":
            first, last = model.transformer.h[layer].ln_1, model.transformer.ln_f
            return np.diag(array(first.weight)) @ centre, np.eye(SIZE), np.diag(array(last.weight)) @ centre
        case "bloom":
            first, last = model.transformer.h[layer].input_layernorm, model.transformer.ln_f
            return np.diag(array(first.weight)) @ centre, np.eye(SIZE), np.diag(array(last.weight)) @ centre
        case "gemma2":
            block = model.model.layers[layer]
            three = (block.input_layernorm, block.post_attention_layernorm, model.model.norm)
            return tuple(np.diag(1 + array(n.weight)) for n in three)
    first, last = model.model.layers[layer].input_layernorm, model.model.norm
    return np.diag(array(first.weight)), np.eye(SIZE), np.diag(array(last.weight))


def state(model):
    """All that must stay: weights, gradients, hooks, modes, and the global random state."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    parameters = [(p.detach().clone(), p.requires_grad, p.grad) for p in model.parameters()]
    return hooks, parameters, model.config._attn_implementation, torch.get_rng_state().tolist()


def repeated_ids(count, period, first=0, low=1, high=VOCAB):
    """One token, then the same random tokens twice, all different."""
    random = np.random.default_rng(0)
    copies = [random.choice(np.arange(low, high), period, replace=False).tolist() for _ in range(count)]
    return [[first, *copy, *copy] for copy in copies]
