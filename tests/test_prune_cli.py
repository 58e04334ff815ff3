"""`headscope prune` from outside: exit codes, formats, what is written and what is not."""

from __future__ import annotations

import csv
import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import headscope
from fixtures.building import build_family
from fixtures.tokenizers import build_tokenizer
from headscope.cli.main import main
from headscope.errors import ModelError
from headscope.pruning import command

QUICK = ("--no-latency", "--quiet")
CONTRACT = {"schema", "heads", "params", "bytes", "kv_cache_bytes_per_token", "equivalence", "repair", "latency"}
CONTRACT |= {"quality", "output", "model", "warnings", "versions"}


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["prune", *map(str, arguments)])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def as_json(run):
    def call(*arguments):
        code, out, err = run(*arguments, "--format", "json")
        return code, json.loads(out), err

    return call


@pytest.fixture
def olmo2(tmp_path) -> Path:
    """A model whose query norm runs over all heads together, so that none can be removed exactly."""
    config = transformers.Olmo2Config(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(0)
    transformers.Olmo2ForCausalLM(config).save_pretrained(tmp_path / "olmo2")
    return tmp_path / "olmo2"


# ------------------------------------------------------------------ what comes out
def test_the_json_of_the_contract(as_json, saved) -> None:
    code, found, err = as_json("--model", saved("llama"), "--heads", "1:0-3", "--shapes", "1x4,2x8")
    assert code == 0 and "error" not in err
    assert set(found) >= CONTRACT and found["schema"] == "headscope/prune@1"
    assert found["heads"] == {"self.1": [0, 1, 2, 3]}
    assert found["repair"] is None and found["quality"] is None and found["output"] is None
    assert found["equivalence"]["passed"] and found["equivalence"]["relative"] <= found["equivalence"]["tolerance"]
    assert set(found["equivalence"]) >= {"max_abs", "relative", "tolerance", "passed"}
    modes = {(c["mode"], c["implementation"]) for c in found["equivalence"]["checks"]}
    assert modes == {(m, i) for m in ("forward", "generate") for i in ("eager", "sdpa")}
    cells = [(c["kind"], c["batch"], c["length"]) for c in found["latency"]]
    assert cells == [("forward", 1, 4), ("forward", 2, 8), ("decode", 1, 4), ("decode", 2, 8)]
    for cell in found["latency"]:
        assert cell["ratio"] == pytest.approx(cell["after_ms"] / cell["before_ms"])
    assert found["latency_conditions"] == {"device": "cpu", "dtype": "float32", "attention": "sdpa", "threads": 1}
    assert found["model"]["class"] == "LlamaForCausalLM"


def test_whole_groups_halve_the_cache(as_json, saved) -> None:
    """Eight query heads in three layers share two key-value heads each: the half of them is one a layer."""
    model = saved("llama")
    config = json.loads((model / "config.json").read_text())
    size = config["num_attention_heads"] // config["num_key_value_heads"]
    half = range(config["num_key_value_heads"] // 2 * size)
    spec = ";".join(f"{layer}:{','.join(map(str, half))}" for layer in range(config["num_hidden_layers"]))
    _, found, _ = as_json("--model", model, "--heads", spec, *QUICK)
    cache = found["kv_cache_bytes_per_token"]
    share = 1 - (config["num_key_value_heads"] // 2) / config["num_key_value_heads"]
    assert cache["before"] > 0 and cache["after"] == cache["before"] * share
    assert found["bytes"]["before"] - found["bytes"]["after"] == 4 * (
        found["params"]["before"] - found["params"]["after"]
    )


def test_requests_are_read_as_the_contract_says(as_json, saved) -> None:
    given = ("--heads", " 0 : 1, 3 ;1:0-1", "--heads", "L2H3", "--heads", "self.2:0")
    code, found, err = as_json("--model", saved("bert"), *given, *QUICK)
    assert code == 0 and found["heads"] == {"self.0": [1, 3], "self.1": [0, 1], "self.2": [0, 3]}
    code, found, err = as_json("--model", saved("bert"), "--heads", "0:1,1", *QUICK)
    assert code == 0 and found["heads"] == {"self.0": [1]} and "more than once" in err
    assert any("more than once" in line for line in found["warnings"])
    code, found, _ = as_json("--model", saved("t5"), "--heads", "encoder.0:1,3;decoder.0:2;cross.1:3", *QUICK)
    assert code == 0 and set(found["heads"]) == {"encoder.0", "decoder.0", "cross.1"}


def test_formats(run, saved) -> None:
    arguments = ("--model", saved("llama"), "--heads", "0:0-3;1:0", "--ragged", "mask", *QUICK)
    code, out, err = run(*arguments)
    assert (
        code == 0
        and "LlamaForCausalLM" not in err
        and "of 8" in out
        and "equal to the original" in out
        and "KV cache" in out
    )
    rows = list(csv.DictReader(io.StringIO(run(*arguments, "--format", "csv")[1])))
    assert [(r["layer"], r["gone"], r["zeroed"]) for r in rows] == [("0", "0 1 2 3", ""), ("1", "0", "0")]
    lines = run(*arguments, "--format", "jsonl")[1].splitlines()
    assert [json.loads(line)["left"] for line in lines] == [int(r["left"]) for r in rows]
    assert run(*arguments, "--format", "markdown")[1].startswith("# ")
    assert run(*arguments, "--format", "pdf")[0] == 2
    assert "LlamaForCausalLM" in run(*arguments[:-1])[2]


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ("0:4", "head 4 does not exist in layer 0 of self: its heads are 0-3"),
        ("9:0", "layer 9 does not exist in this model: its layers are 0-2"),
        ("0:-1", "negative"),
        ("-1:0", "negative"),
        ("0:", "names no head"),
        ("0-2:1", "several layers"),
        ("a:1", "cannot read the layer 'a'"),
        ("", "no heads are given"),
        ("0:1;", "cannot read ''"),
        ("decoder.0:1", "stack 'decoder' does not exist"),
        ("0:all", "would lose all of its 4 heads"),
    ],
)
def test_what_does_not_exist_is_named(run, saved, tmp_path, heads, message) -> None:
    target = tmp_path / "out"
    code, out, err = run("--model", saved("bert"), f"--heads={heads}", "--output", target, *QUICK)
    assert code == 2 and not out and not target.exists()
    assert err.startswith("error: ") and message in err and "hint: " in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--heads"),
        (("--heads", "0:1", "--save-as", "pickle"), "pickle"),
        (("--heads", "0:1", "--pad"), "--pad"),
        (("--heads", "0:1", "--shapes", "big"), "shapes"),
        (("--heads", "0:1", "--shapes", "1x8", "--no-latency"), "--shapes"),
        (("--heads", "0:1", "--eval", "nothing.txt"), "nothing.txt"),
        (("--heads", "0:1", "--output", "/no/such/place/dir"), "/no/such/place"),
        (("--heads", "0:1", "--save-as", "uniform"), "uniform"),
    ],
)
def test_bad_arguments(run, saved, arguments, message) -> None:
    code, out, err = run("--model", saved("bert"), *arguments)
    assert code == 2 and not out and message in err


def test_ragged_plans(run, as_json, saved) -> None:
    """Case 9: a plan that leaves groups uneven is refused with the nearest legal ones, or masked."""
    code, out, err = run("--model", saved("llama"), "--heads", "0:0", *QUICK)
    assert code == 2 and not out and "Nearest legal: self.0:" in err and "--ragged mask" in err
    nearest = err.split("Nearest legal: ")[1].split(" (")[0]
    assert run("--model", saved("llama"), "--heads", nearest, *QUICK)[0] == 0
    code, found, err = as_json("--model", saved("llama"), "--heads", "0:0", "--ragged", "mask", *QUICK)
    assert code == 0 and found["heads"] == found["zeroed"] == {"self.0": [0]}
    assert found["params"]["before"] == found["params"]["after"] and "saves no parameters" in err


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_an_emptied_layer_keeps_a_placeholder(as_json, saved, name) -> None:
    """Case 6: also right while generating with a cache."""
    code, found, err = as_json("--model", saved(name), "--heads", "0:all", "--allow-empty", *QUICK)
    assert code == 0 and found["equivalence"]["passed"] and "placeholder" in err
    generating = {c["mode"] for c in found["equivalence"]["checks"]} == {"forward", "generate"}
    assert generating == (name != "bert") and len(found["zeroed"]["self.0"]) == 1


def test_whole_projection_norms(run, as_json, olmo2, tmp_path) -> None:
    """Case 28: refused with the reason; masked, it is exact."""
    target = tmp_path / "out"
    code, out, err = run("--model", olmo2, "--heads", "0:1", "--output", target, *QUICK)
    assert code == 3 and not out and not target.exists() and "norm" in err and "--save-as masked" in err
    code, found, err = as_json("--model", olmo2, "--heads", "0:1", "--save-as", "masked", "--output", target, *QUICK)
    assert code == 0 and found["zeroed"] == {"self.0": [1]} and found["reloaded"]["max_abs"] == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert not plain.model.layers[0].self_attn.o_proj.weight[:, 8:16].any()


def test_wrapped_projections_are_refused_before_anything_changes() -> None:
    """Case 21: a projection behind an adapter."""
    model = build_family("llama")

    class Adapter(torch.nn.Module):
        def __init__(self, base) -> None:
            super().__init__()
            self.base_layer, self.lora_A = base, torch.nn.Linear(base.in_features, 2)

        def forward(self, x):
            return self.base_layer(x)

    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match="q_proj") as stop:
        headscope.prune(model, "0:0-3;1:0-3", latency=False)
    assert stop.value.exit_code == 3 and stop.value.hint
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_masked_plans_are_all_legal(as_json, saved) -> None:
    """Neither uneven groups nor an emptied layer matter where shapes stay; nothing is said of them."""
    arguments = ("--model", saved("llama"), "--heads", "0:0;1:all", "--save-as", "masked", *QUICK)
    code, found, _ = as_json(*arguments)
    assert code == 0 and found["heads"] == found["zeroed"] == {"self.0": [0], "self.1": list(range(8))}
    assert found["warnings"] == ["no speed-up expected: shapes unchanged"] and found["equivalence"]["passed"]


@pytest.mark.parametrize("name", ["vit", "clip"])
def test_images_are_not_evaluated_on_texts(run, saved, tmp_path, name) -> None:
    (tmp_path / "texts.txt").write_text("the cat\n")
    stack = "vision." if name == "clip" else ""
    code, out, err = run("--model", saved(name), "--heads", f"{stack}0:1", "--eval", tmp_path / "texts.txt", *QUICK)
    assert code == 3 and not out and "--eval" in err and "--image" not in err


# ------------------------------------------------------------------ what is written
def test_nothing_is_written_without_output(run, saved, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--model", saved("gpt2"), "--heads", "0:1", *QUICK)[0] == 0
    assert run("--model", saved("gpt2"), "--heads", "0:1", "--output", "out", "--dry-run", *QUICK)[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_written_once(run, as_json, saved, tmp_path) -> None:
    target = tmp_path / "out"
    arguments = ("--model", saved("gpt2"), "--heads", "0:1;2:0,3", "--output", target, *QUICK)
    code, found, _ = as_json(*arguments)
    assert code == 0 and found["output"] == str(target) and found["reloaded"]["max_abs"] == 0
    assert found["heads"] == {"self.0": [1], "self.2": [0, 3]}
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["headscope"]["heads"] == found["heads"]
    assert sum(p.numel() for p in headscope.load(str(target)).parameters()) == found["params"]["after"]
    code, out, err = run(*arguments)
    assert code == 2 and not out and "exists" in err and "--force" in err
    assert run(*arguments, "--force")[0] == 0


def test_original_numbers_on_a_pruned_directory(as_json, saved, tmp_path) -> None:
    """Case 5."""
    first, second, once = tmp_path / "first", tmp_path / "second", tmp_path / "once"
    as_json("--model", saved("gpt2"), "--heads", "0:1", "--output", first, *QUICK)
    code, found, _ = as_json("--model", first, "--heads", "0:3", "--output", second, *QUICK)
    assert code == 0 and found["heads"] == {"self.0": [1, 3]} and found["layers"][0]["num_heads"] == 4
    as_json("--model", saved("gpt2"), "--heads", "0:1,3", "--output", once, *QUICK)
    assert (second / "model.safetensors").read_bytes() == (once / "model.safetensors").read_bytes()
    code, found, err = as_json("--model", second, "--heads", "0:1", *QUICK)
    assert code == 0 and "removed already" in err and found["params"]["before"] == found["params"]["after"]
    code, found, err = as_json("--model", second, "--heads", "0:2", "--save-as", "masked", *QUICK)
    assert code == 0 and found["zeroed"] == found["heads"] == {"self.0": [1, 2, 3]}
    assert found["params"]["after"] > found["params"]["before"]


def test_layers_that_share_a_module(as_json, saved, tmp_path) -> None:
    """Case 16: the union, said once, and it loads again."""
    target = tmp_path / "out"
    code, found, err = as_json("--model", saved("albert"), "--heads", "0:1;1:2", "--output", target, *QUICK)
    assert code == 0 and err.count("share one module") == 1 and found["reloaded"]["max_abs"] == 0
    assert found["heads"] == {f"self.{layer}": [1, 2] for layer in range(3)}


def test_a_masked_model_promises_nothing(as_json, saved) -> None:
    """Case 24."""
    code, found, err = as_json("--model", saved("bert"), "--heads", "0:1,2", "--save-as", "masked", "--shapes", "1x8")
    assert code == 0 and "no speed-up expected: shapes unchanged" in err and len(found["latency"]) == 1
    assert found["params"]["before"] == found["params"]["after"] and found["heads"] == {"self.0": [1, 2]}
    code, found, err = as_json("--model", saved("bert"), "--heads", "0:1,2", "--shapes", "1x8")
    assert code == 0 and "no speed-up" not in err


def test_a_uniform_model_loads_in_plain_transformers(as_json, saved, tmp_path) -> None:
    target = tmp_path / "out"
    heads = ";".join(f"{layer}:0,1" for layer in range(2))
    code, found, _ = as_json(
        "--model", saved("mistral"), "--heads", heads, "--save-as", "uniform", "-o", target, *QUICK
    )
    assert code == 0 and found["reloaded"]["max_abs"] == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert sum(p.numel() for p in plain.parameters()) == found["params"]["after"]
    code, padded, _ = as_json("--model", saved("mistral"), "--heads", "0:0,1", "--save-as", "uniform", "--pad", *QUICK)
    assert code == 0 and padded["params"]["after"] == padded["params"]["before"]


# ------------------------------------------------------------------ what goes wrong
def test_what_is_not_equal_is_not_written(as_json, saved, tmp_path, monkeypatch) -> None:
    def wrong(model, plan) -> None:
        apply(model, plan)
        with torch.no_grad():
            model.transformer.h[0].attn.c_proj.weight[0, 0] += 1

    apply = command.apply
    monkeypatch.setattr(command, "apply", wrong)
    target = tmp_path / "out"
    code, found, _ = as_json("--model", saved("gpt2"), "--heads", "0:1", "--output", target)
    assert code == 1 and not found["equivalence"]["passed"] and found["output"] is None
    assert found["latency"] == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 4),
        (torch.OutOfMemoryError("out of memory"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_nothing_half_written_remains(run, saved, tmp_path, monkeypatch, error, code) -> None:
    def fail(self, folder, **arguments) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    found, out, _ = run("--model", saved("gpt2"), "--heads", "0:1", "--output", tmp_path / "out", *QUICK)
    assert found == code and not out and list(tmp_path.iterdir()) == []


def test_a_model_without_attention_heads(run, saved) -> None:
    code, _, err = run("--model", saved("mamba"), "--heads", "0:0")
    assert code == 3 and "no attention" in err


# ------------------------------------------------------------------ quality
def test_quality_is_reported(as_json, run, saved, tmp_path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("the cat sat on the mat\nit was tired\n")
    arguments = ("--model", saved("gpt2"), "--heads", "0:1,2", "--eval", file, *QUICK)
    _, found, _ = as_json(*arguments)
    assert found["quality"]["metric"] == "perplexity" and found["quality"]["texts"] == 2
    assert found["quality"]["before"] != found["quality"]["after"]
    assert "perplexity: " in run(*arguments)[1]


def test_the_loaded_model_is_left_as_it_was() -> None:
    model = build_family("gpt2").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokenizer = build_tokenizer("byte_bpe")
    result = headscope.prune(model, {0: [1]}, eval=["the cat sat"], latency="1x4", tokenizer=tokenizer)
    assert result.passed and result.quality is not None and len(result.latency) == 2
    calm = headscope.prune(build_family("gpt2"), {0: [1]}, eval=["the cat sat"], latency=False, tokenizer=tokenizer)
    assert result.quality == calm.quality  # no dropout, although the model is in training
    assert model.training and all(m.training for m in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not hasattr(model.config, "headscope")


def test_the_help_is_light() -> None:
    script = "import sys\nfrom headscope.cli.main import main\ntry:\n    main(['prune', '--help'])\n"
    script += "except SystemExit:\n    pass\nprint('torch' in sys.modules, 'transformers' in sys.modules)"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False" and "--heads" in done.stdout
