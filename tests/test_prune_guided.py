"""Pruning by scores with a repair: the Python API and the command line on tiny models, against plain computations."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, BertModel, LlamaForCausalLM, T5ForConditionalGeneration
from typer.testing import CliRunner

import headscope
from headscope.capture.outputs import find_outputs
from headscope.cli.main import app
from headscope.errors import InputError
from headscope.importance.loss import measure
from headscope.pruning.guide import Guide, deal_roles
from headscope.pruning.masking import masked_heads
from tests.prune_cases import without_heads

WORDS = (
    "cat",
    "dog",
    "house",
    "mat",
    "and",
    "the",
    "on",
    "a",
    "sat",
    "was",
    "tired",
    "one",
    "another",
    "it",
    "because",
)


def texts(count: int = 60, seed: int = 0) -> list[str]:
    """Sentences by chance, no two alike."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, 24)) + f" {i}" for i in range(count)]


@pytest.fixture(scope="module")
def llama(family_dir):
    """A Llama of 3 layers, 8 heads and 4 groups, some heads of which say little."""
    config = AutoConfig.from_pretrained(family_dir("llama"))
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 3, 8, 4
    config.hidden_size, config.head_dim, config.intermediate_size = 64, 8, 96
    config.layer_types = None
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight[:, 8 * number : 8 * number + 8] *= 1e-3
    return model, AutoTokenizer.from_pretrained(family_dir("llama"))


# ------------------------------------------------------------------ choosing
@pytest.mark.parametrize("method", ["gradient", "gradient-token"])
def test_the_heads_that_say_little_go_first(llama, method) -> None:
    model, tokenizer = llama
    result = headscope.prune(
        model, method=method, data=texts(), drop=0.125, save_as="masked", tokenizer=tokenizer, latency=False
    )
    assert result.passed
    assert result.heads == {"self.0": (0,), "self.1": (1,), "self.2": (2,)}
    assert (result.chosen.count, result.chosen.of, result.chosen.unit) == (3, 24, "head")
    assert abs(result.chosen.measured) < 1e-3
    assert result.chosen.low <= result.chosen.measured <= result.chosen.high


def test_groups_leave_where_shapes_shrink(llama) -> None:
    model, tokenizer = llama
    result = headscope.prune(model, method="gradient", data=texts(), drop=0.3, tokenizer=tokenizer, latency=False)
    assert result.passed and result.chosen.unit == "kv-group"
    assert (result.chosen.count, result.chosen.of) == (3, 12)
    assert result.kv_cache.after == result.kv_cache.before * 0.75


def test_what_is_reported_is_what_is_lost_on_texts_of_their_own(llama) -> None:
    model, tokenizer = llama
    data = texts()
    result = headscope.prune(
        model, method="random", data=data, drop=0.5, save_as="masked", tokenizer=tokenizer, latency=False, seed=3
    )
    from headscope.importance.examples import read_examples
    from headscope.importance.methods import method_named
    from headscope.models.loading import wrap_model

    guide = Guide(method=method_named("random"), drop=0.5, data=read_examples(data), seed=3)
    roles = deal_roles(wrap_model(model, tokenizer=tokenizer), guide)
    assert roles.ranking is None and roles.selection is None
    assert result.chosen.sizes == {"report": (roles.report.texts, roles.report.tokens)}
    base = measure(model, roles.report.batches, roles.report.loss)
    with without_heads(model, result.heads):
        added, _ = measure(model, roles.report.batches, roles.report.loss).added(base)
    assert result.chosen.measured == pytest.approx(added, abs=1e-5)


def test_scores_from_a_file_choose_the_same(llama, tmp_path) -> None:
    model, tokenizer = llama
    scores = headscope.head_importance(model, texts(), method="gradient", tokenizer=tokenizer)
    (tmp_path / "scores.json").write_text(json.dumps(scores.to_dict()))
    options = {"drop": 0.25, "save_as": "masked", "tokenizer": tokenizer, "latency": False}
    by_file = headscope.prune(model, scores=tmp_path / "scores.json", **options)
    assert by_file.heads == headscope.prune(model, scores=scores, **options).heads
    ranked = sorted(scores.heads, key=lambda h: h.score)[:6]
    assert sorted((h.layer, h.head) for h in ranked) == sorted(
        (int(name.split(".")[1]), head) for name, heads in by_file.heads.items() for head in heads
    )


def test_until_drop_stays_under_its_bound_and_one_more_does_not(llama) -> None:
    model, tokenizer = llama
    lines: list[str] = []
    result = headscope.prune(
        model,
        method="gradient",
        data=texts(120),
        until_drop="2%",
        save_as="masked",
        tokenizer=tokenizer,
        latency=False,
        report=lines.append,
    )
    found = {int(line.split()[0]): float(line.split(": ")[1].split()[0]) for line in lines if " units: " in line}
    count = result.chosen.count
    assert 1 <= count < 21 and found[count] < math.log(1.02) <= found[count + 1]
    assert set(result.chosen.sizes) == {"ranking", "selection", "report"}
    with pytest.raises(InputError, match="single"):
        headscope.prune(
            model, method="gradient", data=texts(120), until_drop=1e-9, save_as="masked", tokenizer=tokenizer
        )


def test_steps_score_what_is_left(llama) -> None:
    model, tokenizer = llama
    found = [
        headscope.prune(
            model,
            method="gradient",
            data=texts(),
            drop=0.5,
            steps=steps,
            save_as="masked",
            tokenizer=tokenizer,
            latency=False,
        )
        for steps in (1, 4)
    ]
    for result in found:
        assert result.passed and result.chosen.count == 12
        assert sum(map(len, result.heads.values())) == 12


# ------------------------------------------------------------------ repair
def redundant(model):
    """The same model with heads 2 and 3 of each layer twice 0 and 1: what they give can be made up for exactly."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight[16:32] = (
                    projection.weight[:16] if projection is attention.q_proj else projection.weight[16:32]
                )
            for projection in (attention.k_proj, attention.v_proj):
                projection.weight[8:16] = projection.weight[:8]
    return model


@pytest.mark.parametrize("form", ["structural", "masked"])
def test_a_repair_makes_up_for_what_others_know(llama, tmp_path, form) -> None:
    model, tokenizer = redundant(llama[0]), llama[1]
    heads = {0: [2, 3], 1: [2, 3], 2: [2, 3]}
    options = {"save_as": form, "tokenizer": tokenizer, "latency": False, "output": tmp_path / "out"}
    before = copy.deepcopy(model.state_dict())
    result = headscope.prune(model, heads, repair=texts(200), **options)
    assert result.passed and result.repair.applied
    assert result.repair.loss_after < result.repair.loss_before
    again = headscope.load(tmp_path / "out").eval()
    ids = torch.tensor([tokenizer(" ".join(texts(1, seed=9)))["input_ids"]])
    with torch.no_grad():
        wanted, given = model(ids).logits, again(ids).logits
        with masked_heads(model, {f"self.{i}": (2, 3) for i in range(3)}):
            off = (model(ids).logits - wanted).abs().max()
    assert (given - wanted).abs().max() < 0.02 * off
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_repair_that_does_not_help_is_not_applied(llama, monkeypatch) -> None:
    model, tokenizer = llama
    from headscope.pruning import repairing

    def spoil(original, after, batches, **options):
        report = spoil.real(original, after, batches, **options)
        with torch.no_grad():
            find_outputs(after)[0].module.weight.mul_(-3)
        return report

    spoil.real = repairing.repair
    monkeypatch.setattr(repairing, "repair", spoil)
    plain = headscope.prune(model, {0: [2, 3]}, tokenizer=tokenizer, latency=False, eval=texts(5))
    result = headscope.prune(model, {0: [2, 3]}, repair=texts(100), tokenizer=tokenizer, latency=False, eval=texts(5))
    assert not result.repair.applied and "no less" in result.repair.reason
    assert result.quality.after == plain.quality.after


@pytest.mark.parametrize(("name", "cls"), [("bert", BertModel), ("t5", T5ForConditionalGeneration)])
def test_other_kinds_of_model(family_dir, name, cls) -> None:
    torch.manual_seed(0)
    model = cls(AutoConfig.from_pretrained(family_dir(name))).eval()
    tokenizer = AutoTokenizer.from_pretrained(family_dir(name))
    result = headscope.prune(
        model, method="surgeon", data=texts(160), drop=0.3, repair=True, tokenizer=tokenizer, latency=False
    )
    assert result.passed and result.chosen.predicted >= 0
    assert set(result.chosen.sizes) == {"ranking", "repair", "selection", "report"}
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["repair"]["layers"]


def test_what_is_not_proved_is_neither_repaired_nor_measured(llama, monkeypatch) -> None:
    model, tokenizer = llama
    from headscope.pruning import command

    real = command.prove
    monkeypatch.setattr(command, "prove", lambda *args, **options: replace(real(*args, **options), passed=False))
    result = headscope.prune(
        model, method="gradient", data=texts(100), drop=0.3, repair=True, tokenizer=tokenizer, latency=False
    )
    assert not result.passed and result.repair is None
    assert result.chosen.count == 3 and result.chosen.measured is None


def test_heads_that_do_not_exist_are_refused_before_anything_is_scored(llama) -> None:
    model, tokenizer = llama
    said: list[str] = []
    with pytest.raises(InputError, match="head 8 does not exist"):
        headscope.head_importance(model, texts(), method="ablation", head="8", tokenizer=tokenizer, report=said.append)
    assert said == []


# ------------------------------------------------------------------ curve and command line
@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"min_per_layer": 0}])
def test_a_curve_needs_choices_and_heads_that_stay(llama, wrong) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        headscope.prune_curve(llama[0], texts(), tokenizer=llama[1], **wrong)


def test_a_curve_has_every_method_and_share(llama) -> None:
    model, tokenizer = llama
    curve = headscope.prune_curve(
        model,
        texts(120),
        methods=("random", "gradient", "surgeon"),
        shares=(0.125, 0.5),
        repair=True,
        seeds=2,
        tokenizer=tokenizer,
    )
    assert len(curve.points) == 3 * 2 * 2
    assert {p.seeds for p in curve.points if p.method == "random"} == {2}
    by = {(p.method, p.repaired, p.share): p for p in curve.points}
    assert abs(by["gradient", False, 0.125].added) < by["random", False, 0.125].high
    assert all(p.low <= p.added <= p.high for p in curve.points)
    assert all(by[m, True, s].added != by[m, False, s].added for m in ("gradient", "surgeon") for s in (0.125, 0.5))


def test_the_command_line_scores_prunes_and_repairs(llama, tmp_path) -> None:
    model, tokenizer = llama
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.txt").write_text("\n".join(texts(120)))
    runner = CliRunner()
    scores, out = tmp_path / "scores.json", tmp_path / "out"
    common = ["--model", str(tmp_path / "model"), "--quiet"]
    done = runner.invoke(
        app, ["importance", "--data", str(tmp_path / "data.txt"), "--method", "gradient", "-o", str(scores), *common]
    )
    assert done.exit_code == 0, done.output
    written = json.loads(scores.read_text())
    assert written["schema"] == "headscope/importance@1"
    assert (len(written["heads"]), len(written["kv_groups"])) == (24, 12)
    data = str(tmp_path / "data.txt")
    done = runner.invoke(
        app,
        [
            "prune",
            "--scores",
            str(scores),
            "--drop",
            "0.3",
            "--repair",
            data,
            "-o",
            str(out),
            "-f",
            "json",
            "--no-latency",
            *common,
        ],
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["chosen"]["count"] == 3 and said["repair"]["applied"] in (True, False)
    assert said["chosen"]["measured"] is not None
    assert headscope.load(out).num_parameters() == said["params"]["after"]
