"""How heads were chosen and what a repair came to, as lines of a pruning's table, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest

from headscope.pruning.outcome import Chosen, RefitLayer, RepairOutcome
from headscope.views.choosing import chosen_lines, loss_unit, perplexity_rise, repair_lines
from headscope.views.pruning import render_pruning
from tests.test_views_pruning import result

SIZES = {"ranking": (24, 6120), "repair": (100, 25500), "selection": (1, 255), "report": (16, 4080)}
CHOSEN = Chosen("surgeon", "head", 81, 270, 0.115, "causal", 0.0764, 0.07, 0.0828, SIZES)
LAYERS = (
    RefitLayer("self.0", 0.01, 0.2, 0.05),
    RefitLayer("self.1", 0.1, 0.4, 0.15),
    RefitLayer("self.2", None, 0.9, 0.9),
)
REPAIR = RepairOutcome(True, "the selection texts lose less with it", False, 100, 25500, LAYERS, 3.1, 2.95)


def test_what_was_chosen() -> None:
    lines = chosen_lines(result(chosen=CHOSEN))
    assert lines == [
        "81 of 270 heads (30.0 %) by surgeon",
        "added loss: 0.1150 predicted, 0.0764 measured on the report texts (95 % interval 0.0700 to 0.0828), nats a "
        "token; perplexity +7.94 %",
        "data, nothing used twice: ranking 24 texts, 6,120 tokens; repair 100 texts, 25,500 tokens; selection 1 text, "
        "255 tokens; report 16 texts, 4,080 tokens",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"predicted": None, "measured": None, "low": None, "high": None, "loss": None}, None),
        ({"measured": None, "low": None, "high": None}, "added loss: 0.1150 predicted"),
        (
            {"predicted": None, "low": None, "high": None, "loss": "classifier"},
            "added loss: 0.0764 measured on the report",
        ),
        ({"loss": "output"}, "1 - cosine to the original's output"),
        ({"measured": -0.01}, "perplexity -1.00 %"),
    ],
)
def test_what_is_not_known_is_not_said(changes, line) -> None:
    lines = chosen_lines(result(chosen=dataclasses.replace(CHOSEN, **changes)))
    assert len(lines) == (2 if line is None else 3)
    if line is not None:
        assert line in lines[1] and "None" not in lines[1]
    causal = changes.get("loss", "causal") == "causal" and changes.get("measured", 0) is not None
    assert ("perplexity" in " ".join(lines)) is causal


def test_groups_and_no_data() -> None:
    found = dataclasses.replace(CHOSEN, unit="kv-group", count=1, of=90, sizes={})
    assert chosen_lines(result(chosen=found))[0] == "1 of 90 KV groups (1.1 %) by surgeon"
    assert not any("data" in line for line in chosen_lines(result(chosen=found)))


def test_a_repair_says_what_it_did() -> None:
    first, second = repair_lines(result(repair=REPAIR))
    assert first == "repair applied: the selection texts lose less with it"
    assert second == (
        "2 of 3 output projections refitted on 100 texts, 25,500 tokens; they miss their targets by 30.0 % before, "
        "10.0 % after (mean); ridge 0.01 to 0.1"
    )


def test_a_repair_that_does_not_help_is_not_hidden() -> None:
    found = dataclasses.replace(REPAIR, applied=False, reason="they lose no less", mlp=True, layers=LAYERS[2:])
    assert repair_lines(result(repair=found)) == [
        "repair NOT applied: they lose no less",
        "0 of 1 output and down projections refitted on 100 texts, 25,500 tokens",
    ]


def test_heads_that_were_named_leave_the_report_as_it_was() -> None:
    assert chosen_lines(result()) == repair_lines(result()) == []
    assert result().to_dict()["repair"] is None and result().to_dict()["chosen"] is None


def test_every_format_has_it() -> None:
    found = result(chosen=CHOSEN, repair=REPAIR)
    for name in ("table", "markdown"):
        words = " ".join(render_pruning(found, name).split())
        for line in (*chosen_lines(found), *repair_lines(found)):
            assert line in words
    read = json.loads(render_pruning(found, "json"))
    assert read["chosen"] == CHOSEN.to_dict() and read["repair"] == REPAIR.to_dict()
    assert read["chosen"]["sizes"]["repair"] == {"texts": 100, "tokens": 25500}


def test_units_and_perplexity() -> None:
    assert loss_unit("causal") == loss_unit("decoder") == "nats a token" and loss_unit(None) == "loss"
    assert perplexity_rise(0.00995033) == pytest.approx(0.01) and perplexity_rise(1e4) == float("inf")
