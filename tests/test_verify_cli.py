"""`headscope verify` from outside: exit codes, formats, what goes where."""

import csv
import io
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from headscope.cli.main import main


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["verify", *map(str, arguments)])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def faulty(saved, tmp_path):
    """A copy of the saved GPT-2 in which one head's keys are a little larger."""
    from shutil import copytree

    copytree(saved("gpt2"), tmp_path / "faulty")
    weights = tmp_path / "faulty" / "model.safetensors"
    tensors = load_file(weights)
    name = next(n for n in tensors if n.endswith("h.1.attn.c_attn.weight"))
    width = tensors[name].shape[1] // 3
    tensors[name][:, width : width + 8] *= 1.05
    save_file(tensors, weights, metadata={"format": "pt"})
    return tmp_path / "faulty"


def test_a_model_that_is_rebuilt_passes(run, saved):
    code, out, err = run("--model", saved("gpt2"), "--quiet")
    assert code == 0 and "passed" in out and "error" not in err


def test_a_model_that_differs_from_its_checkpoint_fails_with_1(run, saved, faulty):
    code, out, _ = run("--model", faulty, "--checkpoint", saved("gpt2"))
    assert code == 1 and "FAILED" in out and "L1H0" in out
    code, out, _ = run("--model", faulty, "--checkpoint", saved("gpt2"), "--format", "json")
    result = json.loads(out)
    assert code == 1 and result["passed"] is False
    assert {(s["layer"], s["worst_head"]) for s in result["sites"] if not s["passed"]} >= {(1, 0)}
    assert run("--model", faulty)[0] == 0


def test_formats_hold_the_same_numbers(run, saved, tmp_path):
    arguments = ("--model", saved("t5"), "--stack", "cross", "--backend", "numpy")
    _, out, _ = run(*arguments, "--format", "json")
    sites = json.loads(out)["sites"]
    assert {s["stack"] for s in sites} == {"cross"} and {s["backend"] for s in sites} == {"numpy"}
    _, lines, _ = run(*arguments, "--format", "jsonl")
    assert [json.loads(line) for line in lines.splitlines()] == sites
    run(*arguments, "--output", tmp_path / "sites.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "sites.csv").read_text())))
    assert [float(r["max_abs_weights"]) for r in rows] == [s["max_abs_weights"] for s in sites]
    _, page, _ = run(*arguments, "--format", "markdown")
    assert page.startswith("# ") and "cross.0" in page


def test_a_head_is_explained(run, saved):
    code, out, _ = run("--model", saved("llama"), "--explain", "L1H2", "--text", "The cat sat.")
    assert code == 0 and "rotated Q" in out
    code, out, err = run("--model", saved("llama"), "--explain", "L1H2", "--format", "csv")
    assert code == 2 and not out and "hint:" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--layer", "99"), 2, "layer 99"),
        (("--stack", "vision"), 2, "vision"),
        (("--backend", "jax"), 2, "backend"),
        (("--text", " "), 2, "empty"),
        (("--output", "/no/such/place/x.json"), 2, "directory"),
        (("--explain", "5:3"), 2, "5:3"),
    ],
)
def test_bad_arguments(run, saved, arguments, code, message):
    found, out, err = run("--model", saved("gpt2"), *arguments)
    assert found == code and not out
    assert err.startswith("error: ") and message in err and "Traceback" not in err


def test_a_model_without_attention(run, saved):
    code, _, err = run("--model", saved("mamba"))
    assert code == 3 and "no attention" in err


def test_every_site_skipped_is_exit_3(run, saved, tmp_path):
    """Whole-window attention: nothing that we rebuild."""
    from transformers import DiffLlamaConfig, DiffLlamaModel

    from fixtures.tokenizers import build_tokenizer

    tokenizer = build_tokenizer("unigram_bos")
    config = DiffLlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    DiffLlamaModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    code, out, _ = run("--model", tmp_path / "model")
    assert code == 3 and "skipped" in out and "not verified" in out
