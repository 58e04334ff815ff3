"""The coverage harness: right is called right, each kind of fault is found, and the exit code says so."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import independent
import judgement
import run
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.attention.streaming import StreamedWeights
from headscope.errors import ModelError
from headscope.heads.statistics import HeadStatistics
from independent import Returned
from judgement import NONE, REFUSED, RETURNED, SCORES, WRONG, Verdict, examine
from report import CRASHED, NOT_RUN, Row, lines, passes, reason_group, write_tsv
from subjects import Subject, subject_of, tame


def subject(name: str) -> Subject:
    return subject_of(build_family(name), example_inputs(FAMILIES[name]))


@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "gpt_oss", "t5", "bloom", "deberta_v2", "albert", "clip"])
def test_what_is_right_is_called_right(name):
    verdict = examine(subject(name))
    layers = sum(len(stack.layers) for stack in FAMILIES[name].stacks.values())
    heads = sum(len(stack.layers) * stack.num_heads for stack in FAMILIES[name].stacks.values())
    assert (verdict.outcome, verdict.layers, verdict.heads) == (RETURNED, (layers, layers), heads), verdict
    assert 0 < verdict.worst < judgement.TOLERANCE and verdict.left_out == ()


@pytest.mark.parametrize("returned", [[], [Returned("attentions", i, np.full((2, 4, 12, 12), 1 / 12)) for i in (0, 1)]])
@pytest.mark.parametrize("name", ["bert", "gpt_oss", "deberta_v2"])
def test_scores_serve_where_the_model_returns_nothing_or_something_else(name, returned, monkeypatch):
    monkeypatch.setattr(independent, "_returned", lambda output: iter(returned))
    verdict = examine(subject(name))
    assert verdict.outcome == SCORES and verdict.layers[1] == 0 and verdict.heads > 0


def test_weights_that_nobody_set_are_no_reason_to_refuse():
    model = build_family("bert")
    with torch.no_grad():
        model.encoder.layer[1].intermediate.dense.weight[:2] = torch.tensor([[torch.nan], [1e30]])
    inputs = example_inputs(FAMILIES["bert"])
    assert examine(subject_of(model, inputs)).outcome == REFUSED
    assert examine(subject_of(tame(model), inputs)).outcome == RETURNED


def test_a_model_without_attention_is_told_apart():
    assert examine(subject("mamba")).outcome == NONE


def test_a_refusal_keeps_its_reason(monkeypatch):
    def refuse(*_):
        raise ModelError("cannot be read yet")

    monkeypatch.setattr(judgement, "measure", refuse)
    assert examine(subject("bert")) == Verdict(REFUSED, "cannot be read yet")


# ------------------------------------------------------------------ faults
def changed(monkeypatch, change):
    """Have all values go through `change`."""
    finish = HeadStatistics.finish
    monkeypatch.setattr(HeadStatistics, "finish", lambda self: change(finish(self)))


def off_entropy(monkeypatch):
    right = StreamedWeights.entropy
    monkeypatch.setattr(StreamedWeights, "entropy", lambda self, *a, **k: right(self, *a, **k) + 1e-4)


def off_chance(monkeypatch):
    changed(monkeypatch, lambda found: {
        key: {n: replace(v, chance=v.chance * 1.0001) for n, v in metrics.items()} for key, metrics in found.items()
    })  # fmt: skip


def swapped_layers(monkeypatch):
    changed(monkeypatch, lambda found: {(s, 1 - n if n < 2 else n): metrics for (s, n), metrics in found.items()})


def swapped_heads(monkeypatch):
    changed(monkeypatch, lambda found: {
        key: {n: replace(v, value=v.value[:, ::-1]) for n, v in metrics.items()} for key, metrics in found.items()
    })  # fmt: skip


def swapped_texts(monkeypatch):
    changed(monkeypatch, lambda found: {
        key: {n: replace(v, value=v.value[::-1]) for n, v in metrics.items()} for key, metrics in found.items()
    })  # fmt: skip


def lost_layer(monkeypatch):
    changed(monkeypatch, lambda found: {key: metrics for key, metrics in found.items() if key[1] != 1})


def lost_metric(monkeypatch):
    changed(monkeypatch, lambda found: {
        key: {n: v for n, v in metrics.items() if n != "max_weight_rest"} for key, metrics in found.items()
    })  # fmt: skip


def shifted_numbers(monkeypatch):
    right = judgement.find_sites

    def find_sites(model):
        return tuple(replace(site, layer=site.layer + 1) for site in right(model))

    monkeypatch.setattr(judgement, "find_sites", find_sites)


def denied_attention(monkeypatch):
    def find_sites(model):
        raise ModelError("it has no attention heads")

    monkeypatch.setattr(judgement, "find_sites", find_sites)


FAULTS = {
    off_entropy: "entropy",
    off_chance: "(chance)",
    swapped_layers: "sink (value)",
    swapped_heads: "head 0",
    swapped_texts: "text 0",
    lost_layer: "neither measured nor left out",
    lost_metric: "max_weight_rest",
    shifted_numbers: "is called layer 1",
    denied_attention: "and yet it computes a softmax",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_every_fault_is_found(name, fault, monkeypatch):
    fault(monkeypatch)
    verdict = examine(subject(name))
    assert verdict.outcome == WRONG and FAULTS[fault] in verdict.reason, verdict


# ------------------------------------------------------------------ the report
def row(name, outcome, **more):
    return Row(name, "text", Verdict(outcome, **more), 0.5)


GOOD = (
    row("one", RETURNED, heads=8, worst=1e-7, layers=(2, 2)),
    row("two", SCORES, left_out=("a returned attention of shape (4, 4), not one matrix an example",)),
    row("three", REFUSED, reason="it cannot be read yet (Odd)"),
    row("four", NONE),
    row("five", NOT_RUN),
)


def test_the_table_counts_by_outcome_and_names_reasons():
    text = lines(GOOD)
    assert [line.split() for line in text[1:3]] == [[name, *"51111100"] for name in ("text", "all")]
    assert any(line.endswith("whose layout is not known: three") for line in text)
    assert any(line.endswith("windows, chunks or frames: two") for line in text)
    assert reason_group("no such thing") == "other"


@pytest.mark.parametrize("outcome", [WRONG, CRASHED])
def test_one_fault_fails_and_is_named(outcome):
    rows = (*GOOD, row("six", outcome, reason="entropy is 1, not 2"))
    assert passes(GOOD, 2) and not passes(GOOD, 3) and not passes(rows, 2)
    assert f"{outcome} six: entropy is 1, not 2" in lines(rows)


def test_a_line_for_each_type(tmp_path):
    write_tsv(GOOD, tmp_path / "types.tsv")
    head, *rest = [line.split("\t") for line in (tmp_path / "types.tsv").read_text(encoding="utf-8").splitlines()]
    assert [line[0] for line in rest] == ["one", "two", "three", "four", "five"]
    assert all(len(line) == len(head) for line in rest)
    assert dict(zip(head, rest[0], strict=True)) == {
        "type": "one", "modality": "text", "outcome": RETURNED, "layers": "2", "returned": "2", "heads": "8",
        "worst": "1.0e-07", "streamed": "False", "seconds": "0.50", "reason": "", "left_out": "",
    }  # fmt: skip


# ------------------------------------------------------------------ the command
LIBRARY = """
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES

def iter_model_types():
    return list(FAMILIES)

def tiny_model(name):
    return build_family(name)

def dummy_inputs(name, model):
    return example_inputs(FAMILIES[name])
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`command(*arguments)` gives the exit code and what is printed, with the families as tiny models."""
    (tmp_path / "tiny_models.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "tiny_models", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run, "_quiet", lambda: None)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["run.py", "--tiny-models", str(tmp_path), *arguments])
        try:
            run.main()
        except SystemExit as end:
            return end.code, capsys.readouterr().out
        return 0, capsys.readouterr().out

    yield call
    sys.modules.pop("tiny_models", None)


def test_the_command_prints_its_totals(command):
    code, out = command("--only", "bert,nonsense,mamba")
    assert code == 0 and out.splitlines()[-1].startswith("1 types equal (at least 0)")
    assert next(line for line in out.splitlines() if line.startswith("all")).split()[1:] == list("31001100")


def test_the_command_fails_where_a_type_does(command, monkeypatch):
    off_entropy(monkeypatch)
    code, out = command("--only", "bert")
    assert code == 1 and "WRONG bert: self.0" in out


def test_the_command_fails_where_something_breaks(command, monkeypatch):
    monkeypatch.setattr(run, "examine", lambda subject: 1 / 0)
    code, out = command("--only", "bert")
    assert code == 1 and "CRASHED bert: ZeroDivisionError" in out


def test_the_command_fails_where_too_few_are_equal(command, monkeypatch):
    monkeypatch.setattr(run, "TYPES", ("bert",))
    assert command("--fast")[0] == 1
    monkeypatch.setattr(run, "FAST_MINIMUM", 1)
    assert command("--fast")[0] == 0
