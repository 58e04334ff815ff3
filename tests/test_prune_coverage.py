"""The count of types that can be pruned: right is called proved, and each kind of fault is found."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import pruning
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.pruning import surgery
from pruning import CRASHED, NOT_REBUILT, PROVED, REFUSED, UNSEEN, WRONG, Outcome, kind_of, lines, look_at, passes

OLMO2 = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def tiny(name: str) -> transformers.PreTrainedModel:
    if name != "olmo2":
        return build_family(name)
    torch.manual_seed(0)
    return transformers.Olmo2Model(transformers.Olmo2Config(**OLMO2)).eval()


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        tiny_model=tiny,
        dummy_inputs=lambda name, model: example_inputs(FAMILIES["llama" if name == "olmo2" else name]),
    )
    monkeypatch.setattr(pruning, "load_library", lambda folder: library)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neox", "t5", "clip"])
def test_every_stack_is_proved(name: str) -> None:
    found = look_at(Path(), name)
    assert [(o.stack, o.kind) for o in found] == [(stack, PROVED) for stack in FAMILIES[name].stacks]
    assert all(o.relative < 1e-5 < 1e-2 < o.effect for o in found)
    assert ("generate (sdpa)" in found[0].checks) == (name not in ("bert", "clip"))
    assert passes([found])


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    (found,) = look_at(Path(), "olmo2")
    assert found.kind == REFUSED and "norm over all heads" in found.reason
    assert lines([[found]])[1].startswith("refused 1: is a norm over all heads together")


def test_without_attention_there_is_nothing_to_prune() -> None:
    assert kind_of(look_at(Path(), "mamba")) == NOT_REBUILT


def test_other_heads_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = surgery._kept_places
    monkeypatch.setattr(surgery, "_kept_places", lambda part, role: [1, *right(part, role)[1:]])
    assert kind_of(look_at(Path(), "bert")) == WRONG


def test_heads_without_effect_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_family("bert")
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.output.dense.weight.zero_()
    monkeypatch.setattr(sys.modules[__name__], "build_family", lambda name: model)
    assert kind_of(look_at(Path(), "bert")) == UNSEEN


def test_errors_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pruning, "prune_heads", fail)
    found = look_at(Path(), "bert")
    assert kind_of(found) == CRASHED and not passes([found])


@dataclass(frozen=True)
class Count:
    proved: int
    refused: int
    wrong: int = 0
    crashed: int = 0
    rest: int = 0


@pytest.mark.parametrize(
    ("count", "good"),
    [
        (Count(9, 1), True),
        (Count(8, 1), False),
        (Count(9, 1, rest=50), True),
        (Count(99, 0, wrong=1), False),
        (Count(99, 0, crashed=1), False),
    ],
)
def test_nine_of_ten_are_enough_and_no_fault(count: Count, good: bool) -> None:
    kinds = {PROVED: count.proved, REFUSED: count.refused, WRONG: count.wrong}
    kinds |= {CRASHED: count.crashed, NOT_REBUILT: count.rest}
    types = [[Outcome(f"{kind}{i}", "self", kind)] for kind, number in kinds.items() for i in range(number)]
    assert passes(types) is good
    rebuilt = len(types) - count.rest
    assert lines(types)[0].startswith(f"{rebuilt} of {len(types)} types are rebuilt by verify: {count.proved} proved")
