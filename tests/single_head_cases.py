"""Tiny models and texts for scores of single heads, and gates and masks written without the code that is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from headscope.capture.outputs import find_outputs
from headscope.importance.loss import Loss, parts_of
from headscope.importance.method import Task
from headscope.importance.texts import Data
from headscope.models.batches import Batch, TokenSequence, axis_of, mask_of

VOCABULARY, WIDTH, MASK = 60, 32, 3
_PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MODELS = {
    "bert": ("BertForMaskedLM", _PLAIN),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 64},
    ),
    "llama": ("LlamaForCausalLM", _PLAIN | {"num_key_value_heads": 2}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "num_layers": 3, "num_heads": 4, "d_ff": 48},
    ),
    "albert": ("AlbertForMaskedLM", _PLAIN | {"embedding_size": 16}),
    "distilbert": ("DistilBertModel", {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4}),
}
KINDS = {"bert": "masked", "albert": "masked", "t5": "decoder", "distilbert": "output"}
LENGTHS = (12, 7, 9, 12, 5, 10, 8, 11)


def build(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A tiny model in evaluation mode whose heads differ enough to be told apart."""
    class_name, config = MODELS[name]
    model_class = getattr(transformers, class_name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**config | changes, pad_token_id=0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.15 if parameter.dim() > 1 else 0.05)
    return model.eval()


def texts(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random tokens, none of them special."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCABULARY, n).tolist() for n in lengths]


def data_of(name: str, ids: Sequence[Sequence[int]], batch_size: int = 4) -> Data:
    """Batches of texts, padded on the right; decoders read the texts without their first tokens."""
    batches = tuple(_batch(name, ids, range(len(ids))[i : i + batch_size]) for i in range(0, len(ids), batch_size))
    return Data(batches, Loss(KINDS.get(name, "causal"), MASK), len(ids), sum(map(len, ids)))


def _batch(name: str, ids: Sequence[Sequence[int]], order: Sequence[int]) -> Batch:
    axes = {"text": _axis([ids[i] for i in order])}
    if KINDS.get(name) == "decoder":
        axes["decoder"] = _axis([ids[i][2:] for i in order])
    inputs = {}
    for axis, prefix in ((axes["text"], ""), (axes.get("decoder"), "decoder_")):
        if axis is not None:
            inputs |= {f"{prefix}input_ids": axis.ids, f"{prefix}attention_mask": mask_of(axis)}
    return Batch(inputs, axes, tuple(order))


def _axis(rows: Sequence[Sequence[int]]):
    return axis_of([TokenSequence(tuple(r), (False,) * len(r), ("",) * len(r), tuple(range(len(r)))) for r in rows], 0)


def task_of(name: str, model: PreTrainedModel, ids: Sequence[Sequence[int]], batch_size: int = 4, **options) -> Task:
    """All heads and groups of a model, on texts."""
    data = data_of(name, ids, batch_size)
    data.loss.remember(model, data.batches)
    return Task(model, find_outputs(model), data, **{"units": ("head", "kv-group")} | options)


# ------------------------------------------------------------------ heads, without the code that is tested
_PLACES = {  # paths of output projections, (path, heads, heads a group)
    "bert": [(f"bert.encoder.layer.{i}.attention.output.dense", 4, 1) for i in range(3)],
    "gpt2": [(f"transformer.h.{i}.attn.c_proj", 4, 1) for i in range(3)],
    "llama": [(f"model.layers.{i}.self_attn.o_proj", 4, 2) for i in range(3)],
    "albert": [("albert.encoder.albert_layer_groups.0.albert_layers.0.attention.dense", 4, 1)],
    "t5": [
        *((f"encoder.block.{i}.layer.0.SelfAttention.o", 4, 1) for i in range(3)),
        *((f"decoder.block.{i}.layer.0.SelfAttention.o", 4, 1) for i in range(3)),
        *((f"decoder.block.{i}.layer.1.EncDecAttention.o", 4, 1) for i in range(3)),
    ],
    "distilbert": [(f"transformer.layer.{i}.attention.out_lin", 4, 1) for i in range(2)],
}


def places(name: str) -> dict[str, tuple[str, int, int]]:
    """Of each output projection by `stack.layer`: its path, its heads and how many of them share keys and values."""
    stacks = [f"{s}.{i}" for s in ("encoder", "decoder", "cross") for i in range(3)]
    names = stacks if name == "t5" else [f"self.{i}" for i in range(len(_PLACES[name]))]
    return dict(zip(names, _PLACES[name], strict=True))


@contextmanager
def inputs_changed(model: nn.Module, changes: dict[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Something else goes into the modules at these paths."""

    def hook(change: Callable[[Tensor], Tensor]):
        return lambda module, args: (change(args[0]), *args[1:])

    handles = [model.get_submodule(path).register_forward_pre_hook(hook(c)) for path, c in changes.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loss_alone(name: str, model: PreTrainedModel, row: Sequence[int], number: int) -> tuple[Tensor, int]:
    """The mean loss of one text without padding, and the number of its predictions, written down once more."""
    ids = torch.tensor([row])
    if KINDS.get(name) == "masked":
        wanted = _masked(len(row), number)
        logits = model(input_ids=torch.where(wanted, MASK, ids)).logits[wanted]
        return functional.cross_entropy(logits, ids[wanted], reduction="sum") / max(1, int(wanted.sum())), int(
            wanted.sum()
        )
    if KINDS.get(name) == "decoder":
        read = ids[:, 2:]
        logits = model(input_ids=ids, decoder_input_ids=read).logits
        return functional.cross_entropy(logits[0, :-1], read[0, 1:]), len(row) - 3
    return functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:]), len(row) - 1


def _masked(length: int, number: int) -> Tensor:
    return parts_of(_axis([[9] * length]), (number,), 0) == 0


def snapshot(model: nn.Module) -> dict[str, object]:
    """All that must not change in a model."""
    return {
        "weights": {n: t.detach().clone() for n, t in model.state_dict(keep_vars=True).items()},
        "wanted": [(n, p.requires_grad, p.grad) for n, p in model.named_parameters()],
        "modules": [
            (n, m.training, len(m._forward_pre_hooks), len(m._forward_hooks), sorted(vars(m)))
            for n, m in model.named_modules()
        ],
    }


def assert_untouched(model: nn.Module, before: dict[str, object]) -> None:
    """The model is bit for bit as it was."""
    now = snapshot(model)
    assert now["modules"] == before["modules"]
    assert now["wanted"] == before["wanted"]
    assert all(torch.equal(t, before["weights"][n]) for n, t in now["weights"].items())


def ranked(scored, unit: str = "head") -> list[tuple[str, int]]:
    """Layers and places of units, the one that matters most first."""
    found = [
        (float(s), name, i) for (u, name), layer in scored.items() if u == unit for i, s in enumerate(layer.scores)
    ]
    return [(name, i) for _, name, i in sorted(found, reverse=True)]


def two_heads_matter(heads: Sequence[tuple[int, int]]) -> PreTrainedModel:
    """A Llama of which all heads but these, (layer, head), give almost nothing."""
    model = build("llama")
    with torch.no_grad():
        for number, (path, count, _) in enumerate(_PLACES["llama"]):
            weight = model.get_submodule(path).weight.view(WIDTH, count, -1)
            for head in range(count):
                weight[:, head] *= 3 if (number, head) in heads else 1e-3
    return model
