"""The numbers that are printed for real checkpoints, against plain NumPy on transformers' own `output_attentions`."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import headscope
from fixtures.texts import cut_texts
from headscope.heads.metrics import METRICS
from tests import reference

# The larger model's matrices of 512 tokens take plain NumPy a minute.
LIMITS = {False: (3, 8, 40, 150, 512), True: (1, 8, 40, 150, 300)}


@cache
def checkpoint(path, dtype=torch.float32):
    """A real model as transformers loads it, and its tokenizer."""
    folder, name = (str(path.parent), path.name) if path.suffix == ".gguf" else (str(path), None)
    options = {} if name is None else {"gguf_file": name}
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=dtype, **options).eval()
    return model, AutoTokenizer.from_pretrained(folder, **options)


def texts_for(tokenizer, causal):
    return cut_texts(lambda text: len(tokenizer(text)["input_ids"]), LIMITS[causal])


def reference_values(model, tokenizer, text, causal):
    """Metric by (layer, head), from the matrices that transformers returns for this text alone."""
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    ids = inputs["input_ids"][0]
    special = np.isin(ids.numpy(), tokenizer.all_special_ids)
    visible = reference.visibility(len(ids), causal=causal)
    return {
        (layer, head): reference.metrics(weights, visible, special)
        for layer, matrix in enumerate(attentions)
        for head, weights in enumerate(matrix[0].float().numpy())
    }


def largest_difference(records, expected):
    """Absolute up to 1, relative above: distances are hundreds of tokens."""
    worst = 0.0
    for record in records:
        for name in METRICS:
            theirs, ours = expected[record.layer, record.head][name], record.metrics[name]
            assert (ours is None) == (theirs is None), (record.name, name, ours, theirs)
            if theirs is not None:
                worst = max(worst, abs(ours - theirs) / max(1.0, abs(theirs)))
    return worst


@pytest.mark.parametrize(("name", "causal", "heads"), [("packaged", False, 72), ("smollm2", True, 270)])
def test_every_metric_of_every_head_equals_plain_numpy(name, causal, heads, packaged_model_name, smollm2_path):
    path = smollm2_path if causal else Path(packaged_model_name)
    model, tokenizer = checkpoint(path)
    texts = texts_for(tokenizer, causal)
    expected = [reference_values(model, tokenizer, text, causal) for text in texts]
    metrics = ",".join(METRICS)
    for text, values in zip(texts, expected, strict=True):
        single = headscope.analyze(model, text, tokenizer=tokenizer, metrics=metrics)
        assert len(single.heads) == heads
        assert largest_difference(single.heads, values) < 1e-5
    together = headscope.analyze(model, texts, tokenizer=tokenizer, metrics=metrics, batch_size=5)
    means = {key: reference.mean_over_texts([values[key] for values in expected]) for key in expected[0]}
    assert largest_difference(together.heads, means) < 1e-5
    for record in together.heads:
        assert record.pattern == reference.seed_labels(record.metrics)[0]


def test_bf16_statistics_are_those_of_the_bf16_weights(smollm2_path):
    """Against float32 statistics of the bfloat16 matrices: only the order of summation is left to differ."""
    model, tokenizer = checkpoint(smollm2_path, torch.bfloat16)
    text = texts_for(tokenizer, True)[2]
    result = headscope.analyze(model, text, tokenizer=tokenizer, metrics=",".join(METRICS))
    assert result.model.dtype == "bfloat16"
    assert largest_difference(result.heads, reference_values(model, tokenizer, text, True)) < 1e-5
