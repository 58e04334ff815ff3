"""A real language model without half of its key-value groups: on disk, in a fresh process, with half of the cache."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from prune_cases import relative_difference, without_heads
from transformers import AutoTokenizer

import headscope
from headscope.models.loading import load_model
from headscope.pruning import save
from headscope.pruning.cost import cost_of
from headscope.pruning.proof import prove

TEXTS = ["The capital of France is", "Once upon a time there was a little dog who"]
READER = """
import sys, torch, headscope
folder, file = sys.argv[1:]
given = torch.load(file)
model = headscope.load(folder)
with torch.no_grad():
    output = model(**given["inputs"], use_cache=True)
text = model.generate(**given["inputs"], max_new_tokens=8, do_sample=False)
cache = sum(t.numel() * t.element_size() for layer in output.cache.layers for t in (layer.keys, layer.values))
torch.save({"logits": output.logits, "text": text, "cache": cache, "class": type(model).__name__}, file)
"""


def half(layers: int, groups: int, size: int) -> dict[str, list[int]]:
    """One group of three in even layers and two in odd ones, other ones in each."""
    gone = {n: {n % groups} if n % 2 == 0 else set(range(groups)) - {n % groups} for n in range(layers)}
    return {f"self.{n}": [g * size + i for g in sorted(which) for i in range(size)] for n, which in gone.items()}


def test_without_half_of_the_groups(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "prove", partial(prove, implementations=("eager",), generate=False))
    original = load_model(str(smollm2_path), own_class=True).model
    config = original.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, padding_side="left")
    inputs = dict(tokenizer(TEXTS, return_tensors="pt", padding=True))
    real = inputs["attention_mask"].bool()
    heads = half(30, 3, 3)
    pruned = copy.deepcopy(original)
    headscope.prune_heads(pruned, heads)
    with torch.no_grad():
        logits = pruned(**inputs).logits
        with without_heads(original, heads):
            assert relative_difference([original(**inputs).logits[real]], [logits[real]]) < 1e-5
    before, after = cost_of(original), cost_of(pruned)
    assert after.kv_cache * 2 == before.kv_cache == 2 * 30 * 3 * 64 * 4
    assert before.params - after.params == 45 * 64 * 576 * 8  # rows of 3 + 1 + 1 heads, columns of 3

    report = headscope.save_pruned(pruned, tmp_path / "out", tokenizer=tokenizer)
    assert report.equivalence.max_abs == 0 and report.heads == {n: tuple(h) for n, h in heads.items()}
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert 0 <= size - after.bytes < 100_000  # the file's header
    torch.save({"inputs": inputs}, tmp_path / "run")
    paths = os.pathsep.join([str(Path(headscope.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", READER, str(tmp_path / "out"), str(tmp_path / "run")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = torch.load(tmp_path / "run")
    assert again["class"] == "LlamaForCausalLM" and again["cache"] == real.numel() * after.kv_cache
    assert torch.equal(again["logits"], logits)
    assert torch.equal(again["text"], pruned.generate(**inputs, max_new_tokens=8, do_sample=False))
