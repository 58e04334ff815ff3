"""The teaching view: its numbers are the model's, for every kind of position."""

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM

from fixtures.building import example_inputs
from fixtures.families import FAMILIES
from headscope.errors import InputError
from headscope.models.inputs import prepare
from headscope.models.loading import load_model
from headscope.proof.explain import explain_head
from headscope.views.verification import explanation_table, render_verification


def steps_of(result):
    return {step.name: step for step in result.steps}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3", "t5", "bloom", "gpt_oss", "mistral"])
def test_the_last_weights_are_the_models_own(name, saved, family_model):
    """The whole weight matrix of the explanation against transformers' `output_attentions` on the same text."""
    directory = str(saved(name))
    result = explain_head(directory, "encoder.L1H1" if name == "t5" else "L1H1", "The cat sat.", size=100)
    kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModel
    model = kind.from_pretrained(directory, attn_implementation="eager").eval()
    decoder_texts = ["A cat."] if name == "t5" else None
    prepared = prepare(load_model(directory), texts=["The cat sat."], decoder_texts=decoder_texts)
    with torch.no_grad():
        out = model(**prepared.batches[0].inputs, output_attentions=True)
    attentions = out.encoder_attentions if name == "t5" else out.attentions
    theirs = attentions[1][0, 1].numpy()
    steps = steps_of(result)
    assert steps["weights"].shape == theirs.shape
    assert np.abs(steps["weights"].values - theirs).max() < 1e-5
    assert np.allclose(steps["weights"].values @ steps["value"].values, steps["context"].values, atol=1e-9)


def test_steps_are_those_that_the_model_has(family_model, saved):
    llama, qwen, t5 = (
        steps_of(explain_head(str(saved(n)), h, "The cat sat."))
        for n, h in (("llama", "L0H3"), ("qwen3", "L0H0"), ("t5", "encoder.L0H0"))
    )
    assert "rotated Q" in llama and "normed Q" not in llama and "masked scores" in llama
    assert "normed Q" in qwen and "rotated K" in qwen
    assert "bias" in t5 and "rotated Q" not in t5
    assert "key-value head 0" in llama["projected K"].formula


def test_names_that_are_no_heads(saved):
    for name, message in (
        ("5", "cannot read"),
        ("L9H0", "does not exist"),
        ("L0H99", "head 99"),
        ("decoder.L0H0", "does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            explain_head(str(saved("bert")), name)
    with pytest.raises(InputError, match="several stacks"):
        explain_head(str(saved("t5")), "L0H0")


def test_an_explanation_is_written_as_a_table_and_as_json(saved):
    import io
    import json

    from rich.console import Console

    result = explain_head(str(saved("gpt2")), "L1H1", "The cat sat on the mat.")
    record = json.loads(render_verification(result, "json"))
    assert record["steps"][-1]["name"] == "output"
    masked = next(s for s in record["steps"] if s["name"] == "masked scores")
    assert masked["values"][0][1] is None
    for width in (40, 80):
        out = io.StringIO()
        Console(file=out, width=width, color_system=None).print(explanation_table(result))
        assert "masked scores" in out.getvalue() and "-inf" in out.getvalue()
    with pytest.raises(InputError, match="csv"):
        render_verification(result, "csv")


def test_a_model_object_can_be_explained(family_model):
    model, _, _ = family_model("gpt2")
    result = explain_head(model, "L0H0")
    assert result.name == "L0H0" and FAMILIES["gpt2"] and example_inputs(FAMILIES["gpt2"])


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("t5", "cross.L0H1", {"other input": (13, 32), "projected K": (13, 8), "weights": (7, 13), "output": (7, 32)}),
        ("t5", "decoder.L1H1", {"bias": (7, 7), "masked scores": (7, 7), "output": (7, 32)}),
        ("bloom", "L0H2", {"bias": (13, 13), "biased scores": (13, 13), "output": (13, 32)}),
        ("qwen3_next", "L1H1", {"gate": (13, 8), "gated context": (13, 8), "output": (13, 32)}),
        ("whisper", "cross.L1H0", {"query": (7, 8), "weights": (7, 50)}),
        ("vit", "L0H3", {"input": (17, 32), "weights": (17, 17)}),
        ("clip", "vision.L0H1", {"weights": (17, 17)}),
    ],
)
def test_each_kind_of_attention_has_its_steps(name, head, expected, family_model):
    model, _, _ = family_model(name)
    result = explain_head(model, head, size=64)
    steps = steps_of(result)
    assert f"{result.stack}.{result.name}".endswith(head)
    assert {step: steps[step].shape for step in expected} == expected
    last = steps.get("gated context", steps["context"]).values
    if "gate" in steps:
        assert np.allclose(steps["context"].values * steps["gate"].values, last, atol=1e-12)
    assert "masked scores" in steps or name not in ("bloom", "qwen3_next")


def test_the_heads_of_a_layer_add_up_to_its_output(family_model):
    """The steps' own numbers against the hook on the layer's output projection."""
    model = family_model("qwen3_next")[0]
    seen = []
    hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda m, a, out: seen.append(out))
    parts = [steps_of(explain_head(model, f"L1H{h}", size=64))["output"].values for h in range(4)]
    hook.remove()
    assert np.abs(sum(parts) - seen[0][0].numpy()).max() < 1e-5


@pytest.mark.parametrize("width", [60, 80, 200])
def test_an_explanation_fits_the_width(width, family_model):
    import io

    from rich.console import Console

    for name, head in (("llama", "L1H5"), ("t5", "cross.L0H1"), ("gpt_oss", "L0H1")):
        out = io.StringIO()
        result = explain_head(family_model(name)[0], head)
        Console(file=out, width=width, color_system=None).print(explanation_table(result))
        assert max(len(line) for line in out.getvalue().splitlines()) <= width
        assert all(f"{n}. {step.name}" in out.getvalue() for n, step in enumerate(result.steps, 1))
