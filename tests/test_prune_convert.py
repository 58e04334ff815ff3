"""Between saved forms, from transformers 4, and every command on directories with pruned models."""

from __future__ import annotations

import json
import shutil
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prune_cases import outputs, relative_difference

import headscope
from fixtures import version4
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from fixtures.tokenizers import build_tokenizer
from fixtures.version4 import MODELS, golden, union
from headscope.cli.main import main
from headscope.errors import InputError, ModelError
from headscope.pruning import save
from headscope.pruning.proof import prove

FORMS = ("structural", "remote-code", "uniform", "masked")
TOLERANCE = 5e-8
MISTRAL = "0:2,3; 1:0,1"


@pytest.fixture(autouse=True)
def _short_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "prove", partial(prove, implementations=("eager",), generate=False))
    monkeypatch.delenv("HEADSCOPE_MODEL", raising=False)


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(arg) for arg in argv])
    return int(left.value.code or 0)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned Mistral with a tokenizer, in all forms."""
    root = tmp_path_factory.mktemp("mistral")
    model = build_family("mistral")
    headscope.prune_heads(model, MISTRAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "prove", partial(prove, implementations=("eager",), generate=False))
        for form in FORMS:
            headscope.save_pruned(model, root / form, form=form, tokenizer=build_tokenizer("unigram_bos"))
    return root


# ------------------------------------------------------------------ transformers 4
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_pruning_in_two_steps_gives_what_version_4_gave(name: str, implementation: str, tmp_path: Path) -> None:
    version4.save_version4(name, tmp_path)
    model = headscope.load(str(tmp_path), dtype="float64", attn_implementation=implementation)
    for plan, step in zip(MODELS[name].plans, golden()["models"][name]["steps"], strict=True):
        report = headscope.prune_heads(model, plan)
        _as_recorded(name, model, step, {"sdpa": TOLERANCE, "eager": 2e-6}[implementation])
        assert report.params_after == step["parameters"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 2])
def test_directories_of_version_4_load_exactly(name: str, count: int, tmp_path: Path) -> None:
    heads = union(MODELS[name].plans[:count])
    version4.save_version4(name, tmp_path, heads)
    model = headscope.load(str(tmp_path), dtype="float64", attn_implementation="sdpa")
    _as_recorded(name, model, golden()["models"][name]["steps"][count - 1], TOLERANCE)
    assert model.config.headscope["heads"] == {f"self.{layer}": gone for layer, gone in heads.items()}
    assert not hasattr(model.config, "pruned_heads")


@pytest.mark.parametrize("name", MODELS)
def test_directories_of_version_4_become_ours(name: str, tmp_path: Path) -> None:
    version4.save_version4(name, tmp_path / "old", union(MODELS[name].plans))
    report = headscope.convert(tmp_path / "old", tmp_path / "new")
    assert report.equivalence.relative < 1e-6
    config = json.loads((tmp_path / "new" / "config.json").read_text("utf-8"))
    assert "pruned_heads" not in config and config["headscope"]["form"] == "structural"
    model = headscope.load(str(tmp_path / "new"), dtype="float64", attn_implementation="sdpa")
    _as_recorded(name, model, golden()["models"][name]["steps"][-1], TOLERANCE)


def _as_recorded(name: str, model: Any, step: dict[str, Any], tolerance: float) -> None:
    found, expected = version4.summary(name, version4.last_hidden_state(name, model)), step["output"]
    assert np.abs(np.subtract(found["slice"], expected["slice"])).max() < tolerance
    assert found["sum"] == pytest.approx(expected["sum"], abs=100 * tolerance)
    assert sum(p.numel() for p in model.parameters()) == step["parameters"]


@pytest.mark.parametrize("heads", [{"0": [9]}, {"0": [-1]}, {"7": [0]}, {"0": [0, 1, 2, 3]}, {"x": [1]}, [1]])
def test_pruned_heads_that_cannot_be_are_refused(heads: Any, tmp_path: Path) -> None:
    version4.save_version4("bert", tmp_path, {0: [1]})
    edit(tmp_path, pruned_heads=heads)
    with pytest.raises(ModelError):
        headscope.load(str(tmp_path))


def test_an_empty_entry_of_version_4_means_nothing(tmp_path: Path) -> None:
    version4.save_version4("bert", tmp_path)
    edit(tmp_path, pruned_heads={"0": []})
    assert not hasattr(headscope.load(str(tmp_path)).config, "headscope")


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes))


# ------------------------------------------------------------------ between forms
@pytest.mark.parametrize(("before", "after"), list(permutations(FORMS, 2)))
def test_every_form_becomes_every_other(before: str, after: str, mistral: Path, tmp_path: Path) -> None:
    report = headscope.convert(mistral / before, tmp_path / "out", form=after)
    assert report.equivalence.relative < 1e-5 and report.heads == {"self.0": (2, 3), "self.1": (0, 1)}
    found, expected = headscope.load(str(tmp_path / "out")), headscope.load(str(mistral / after))
    assert {k: v.shape for k, v in found.state_dict().items()} == {k: v.shape for k, v in expected.state_dict().items()}
    inputs = example_inputs(FAMILIES["mistral"])
    assert relative_difference(outputs(expected, inputs), outputs(found, inputs)) < 1e-5
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    if after != "masked":
        assert found.num_parameters() < build_family("mistral").num_parameters()


def test_padding_leaves_again(tmp_path: Path) -> None:
    model = build_family("vit")
    headscope.prune_heads(model, "0:1; 1:2,3")
    headscope.save_pruned(model, tmp_path / "padded", form="uniform", pad=True)
    headscope.convert(tmp_path / "padded", tmp_path / "out")
    again = headscope.load(str(tmp_path / "out"))
    assert again.num_parameters() == model.num_parameters() and again.config.headscope["zeroed"] == {}


def test_heads_that_cannot_leave_stay_zeroed_and_are_named(tmp_path: Path) -> None:
    model = build_family("llama")
    headscope.prune_heads(model, "0:0,4-7,1; 1:2", ragged="mask")
    headscope.save_pruned(model, tmp_path / "masked", form="masked")
    report = headscope.convert(tmp_path / "masked", tmp_path / "out")
    assert report.heads == {"self.0": (0, 1, 4, 5, 6, 7), "self.1": (2,)}
    assert report.zeroed == {"self.1": (2,)} and any("head 2 cannot leave" in note for note in report.notes)


def test_a_whole_model_is_not_converted(family_dir: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no heads were removed"):
        headscope.convert(family_dir("bert"), tmp_path / "out")


def test_a_plan_that_does_not_fit_or_is_newer_is_refused(mistral: Path, tmp_path: Path) -> None:
    shutil.copytree(mistral / "structural", tmp_path / "x")
    plan = json.loads((tmp_path / "x" / "config.json").read_text("utf-8"))["headscope"]
    for wrong in (
        plan | {"version": 2},
        plan | {"heads": {"self.9": [1]}},
        [1],
        plan | {"original": {"self.0": [9, 1]}},
    ):
        edit(tmp_path / "x", headscope=wrong)
        with pytest.raises(ModelError):
            headscope.load(str(tmp_path / "x"))


# ------------------------------------------------------------------ the command line
def test_convert_prints_what_it_wrote(mistral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("convert", mistral / "structural", "--save-as", "masked", "-o", out, "-f", "json") == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert printed["schema"] == "headscope/convert@1" and printed["output"] == str(out)
    assert printed["heads"] == printed["zeroed"] == {"self.0": [2, 3], "self.1": [0, 1]}
    assert printed["equivalence"]["passed"] and printed["bytes"] == sum(f.stat().st_size for f in out.iterdir())
    assert "note: masked: all shapes are kept" in captured.err


@pytest.mark.parametrize("name", ["table", "jsonl", "csv", "markdown"])
def test_convert_has_every_format(name: str, mistral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", mistral / "masked", "-o", tmp_path / "out", "-f", name) == 0
    printed = capsys.readouterr().out
    assert "self.0" in printed and ("2-3" in printed or "[2, 3]" in printed)


def test_convert_errors_have_their_codes(
    mistral: Path, family_dir: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_family("bert")
    headscope.prune_heads(model, "0:1")
    headscope.save_pruned(model, tmp_path / "bert")
    cases = (
        (2, [mistral / "structural"]),
        (2, [mistral / "structural", "-o", mistral / "masked"]),
        (2, [family_dir("bert"), "-o", tmp_path / "x"]),
        (2, [tmp_path / "bert", "-o", tmp_path / "x", "--save-as", "uniform"]),
        (2, [tmp_path / "bert", "-o", tmp_path / "x", "--pad"]),
        (3, [tmp_path / "nothing" / "here", "-o", tmp_path / "x"]),
    )
    for code, argv in cases:
        assert run("convert", *argv) == code, argv
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ") and "hint: " in captured.err
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("form", FORMS)
def test_commands_take_pruned_directories_in_original_numbers(
    form: str, mistral: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("analyze", "the cat sat on the mat", "-m", mistral / form, "-f", "json") == 0
    heads = [(h["layer"], h["head"]) for h in json.loads(capsys.readouterr().out)["heads"]]
    shown = [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert [h for h in heads if h in shown] == shown and (form == "masked" or heads == shown)
    assert run("verify", "--text", "the cat sat on the mat", "-m", mistral / form, "-f", "json") == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_masked_weights_are_zero_only_where_heads_left(mistral: Path) -> None:
    found = headscope.load(str(mistral / "masked")).state_dict()
    whole = build_family("mistral").state_dict()
    assert torch.equal(found["model.layers.0.self_attn.o_proj.weight"][:, :16],
                       whole["model.layers.0.self_attn.o_proj.weight"][:, :16])  # fmt: skip
    assert not found["model.layers.0.self_attn.o_proj.weight"][:, 16:].any()
