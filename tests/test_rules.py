"""Rule sets: exact thresholds, order, ties, runners-up, and every way in which a rules file can be wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headscope
from fixtures.building import build_family
from headscope.errors import InputError
from headscope.heads.labels import at_chance
from headscope.heads.metrics import metric_names
from headscope.heads.rules import RuleSet, load_rules
from tests import reference

SEED, CALIBRATED = load_rules("seed"), load_rules("calibrated")
SHARES = st.one_of(st.none(), st.floats(0, 1), st.sampled_from([0.25, 0.3, 0.4, 0.5, 0.1]))


def after(value):
    return math.nextafter(value, math.inf)


def before(value):
    return math.nextafter(value, -math.inf)


# ------------------------------------------------------------------ the seed rules
@pytest.mark.parametrize(
    ("metric", "threshold", "label", "above"),
    [
        ("sink", 0.4, "attention_sink", True),
        ("prev_token", 0.3, "prev_token", True),
        ("self_attend", 0.4, "self_attend", True),
        ("entropy", 0.5, "focused", False),
    ],
)
def test_a_seed_rule_holds_beyond_its_threshold_and_not_at_it(metric, threshold, label, above):
    nothing = {"sink": 0.0, "prev_token": 0.0, "self_attend": 0.0, "entropy": 9.0}
    beyond, short = (after, before) if above else (before, after)
    assert SEED.label(nothing | {metric: beyond(threshold)}) == (label, "broad")
    assert SEED.label(nothing | {metric: threshold}) == ("broad", None)
    assert SEED.label(nothing | {metric: short(threshold)}) == ("broad", None)
    assert SEED.thresholds == {"sink": 0.4, "prev_token": 0.3, "self_attend": 0.4, "entropy": 0.5}


@given(st.fixed_dictionaries(dict.fromkeys(("sink", "prev_token", "self_attend", "entropy"), SHARES)))
def test_seed_labels_and_runners_up_are_those_of_plain_python(metrics):
    assert SEED.label(metrics) == reference.seed_labels(metrics)
    rest = {f"{name}_rest": value for name, value in metrics.items()}
    assert SEED.without_sink().label(rest) == reference.seed_labels(metrics | {"sink": None})


# ------------------------------------------------------------------ the calibrated rules
@given(
    st.fixed_dictionaries({n: st.one_of(SHARES, st.floats(-1, 1)) for n in reference.LABELS}),
    SHARES.filter(lambda value: value is not None),
)
def test_calibrated_labels_and_runners_up_are_those_of_plain_python(values, entropy):
    metrics = {f"{name}_adjusted": value for name, value in values.items()}
    measured = [value for value in values.values() if value is not None]
    if len(set(measured)) == len(measured):
        assert CALIBRATED.label(metrics | {"relative_entropy": entropy}) == reference.calibrated_choice(values, entropy)


def test_calibrated_ties_go_to_the_rule_that_is_first_in_the_file():
    tie = {"prev_token_adjusted": 0.6, "self_attend_adjusted": 0.6, "next_token_adjusted": 0.6, "sink_adjusted": 0.2}
    assert CALIBRATED.label(tie) == ("prev_token", "next_token")


def test_calibrated_thresholds_are_exact():
    def label(**values):
        return CALIBRATED.label({f"{n}_adjusted": v for n, v in values.items()} | {"relative_entropy": 1.0})

    for name, own in reference.LABELS.items():
        assert label(**{name: 0.3}) == ("broad", None) and label(**{name: after(0.3)}) == (own, None)
    assert label(sink=0.9, prev_token=0.1) == ("attention_sink", None)
    assert label(sink=0.9, prev_token=after(0.1)) == ("attention_sink", "prev_token")
    assert label(sink=0.2, prev_token=0.15) == ("broad", None), "no runner-up to nothing"
    assert CALIBRATED.label({"relative_entropy": 0.25}) == ("broad", None)
    assert CALIBRATED.label({"relative_entropy": before(0.25), "sink_adjusted": 0.2}) == ("focused", None)
    assert CALIBRATED.label({}) == ("unmeasurable", None)
    assert CALIBRATED.label({"sink": 1.0, "relative_entropy": None}) == ("unmeasurable", None)


# ------------------------------------------------------------------ a user's own rules
def toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else repr(value)


def write(tmp_path, table, rules, name="mine.toml"):
    lines = [f"{key} = {toml(value)}" for key, value in table.items()]
    for rule in rules:
        lines += ["[[rule]]", *(f"{key} = {toml(value)}" for key, value in rule.items())]
    path = tmp_path / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


words = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Z")), min_size=1, max_size=8).filter(str.strip)
numbers = st.floats(-1e6, 1e6) | st.integers(-99, 99)
own_rule = st.tuples(words, st.sampled_from(metric_names()), st.sampled_from(["above", "below"]), numbers).map(
    lambda parts: {"label": parts[0], "metric": parts[1], parts[2]: parts[3]}
)


@settings(max_examples=60, deadline=None)
@given(
    rules=st.lists(own_rule, min_size=1, max_size=5),
    choose=st.sampled_from(["first", "largest"]),
    otherwise=words,
    values=st.dictionaries(st.sampled_from(metric_names()), numbers),
)
def test_a_valid_file_does_what_it_says(rules, choose, otherwise, values, tmp_path_factory):
    table = {"name": "mine", "choose": choose, "otherwise": otherwise}
    found = load_rules(write(tmp_path_factory.mktemp("rules"), table, rules))
    assert found.name == "mine" and list(found.metrics) == list(dict.fromkeys(r["metric"] for r in rules))
    assert sorted(found.thresholds.values()) == sorted(float(r.get("above", r.get("below"))) for r in rules) or len(
        {(r["metric"], r["label"]) for r in rules}
    ) < len(rules)

    def holds(rule):
        value = values.get(rule["metric"])
        return value is not None and (value > rule["above"] if "above" in rule else value < rule["below"])

    order = list(rules)
    if choose == "largest":
        above = [r for r in rules if "above" in r]
        order = sorted(above, key=lambda r: -values.get(r["metric"], -math.inf)) + [r for r in rules if "below" in r]
    expected = [r["label"] for r in order if holds(r)] + [otherwise]
    label, runner_up = found.label(values)
    assert label == expected[0]
    if choose == "first":
        assert runner_up == next((e for e in expected if e != label), None)
    else:
        assert runner_up is None or runner_up != label


GOOD = {"label": "a", "metric": "sink", "above": 0.5}
WRONG = {
    "a key that is unknown": ({"threshold": 1}, [GOOD], "unknown key 'threshold'"),
    "a choice that is unknown": ({"choose": "best"}, [GOOD], "choose must be 'first' or 'largest', not 'best'"),
    "no rules": ({"name": "x"}, [], r"no \[\[rule\]\] table"),
    "rules that are no tables": ({"rule": [1, 2]}, [], "rule 1 is not a table"),
    "rules that are one number": ({"rule": 5}, [], r"no \[\[rule\]\] table"),
    "a name that is no text": ({"name": 5}, [GOOD], "name must be a text, not 5"),
    "a name that is blank": ({"name": " "}, [GOOD], "name must be a text"),
    "otherwise that is no text": ({"otherwise": []}, [GOOD], "otherwise must be a text"),
    "unmeasurable that is no text": ({"unmeasurable": False}, [GOOD], "unmeasurable must be a text"),
    "a runner-up that is no number": ({"choose": "largest", "runner_up_above": "x"}, [GOOD], "runner_up_above must be"),
    "a runner-up of the first": ({"runner_up_above": 0.1}, [GOOD], "runner_up_above needs choose = 'largest'"),
    "a rule's key that is unknown": ({}, [GOOD | {"x": 1}], "rule 1 has an unknown key 'x'"),
    "both sides": ({}, [GOOD, GOOD | {"below": 1}], "rule 2 needs either 'above' or 'below'"),
    "no side": ({}, [{"label": "a", "metric": "sink"}], "rule 1 needs either 'above' or 'below'"),
    "no metric": ({}, [{"label": "a", "above": 1}], "rule 1, metric must be a text, not None"),
    "no label": ({}, [{"metric": "sink", "above": 1}], "rule 1, label must be a text, not None"),
    "a metric that is unknown": ({}, [GOOD | {"metric": "sinks"}], "rule 1: unknown metric 'sinks'"),
    "a metric that cannot be": ({}, [GOOD | {"metric": "sink_rest"}], "rule 1: unknown metric 'sink_rest'"),
    "a threshold that is true": ({}, [GOOD | {"above": True}], "rule 1, above must be a number, not True"),
    "a threshold that is text": ({}, [GOOD | {"above": "0.5"}], "rule 1, above must be a number"),
    "a threshold that is nan": ({}, [GOOD | {"above": math.nan}], "rule 1, above must be a number, not nan"),
    "a threshold that is infinite": ({}, [GOOD | {"above": math.inf}], "rule 1, above must be a number, not inf"),
    "a threshold that is huge": ({}, [GOOD | {"above": 10**400}], "rule 1, above must be a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_by_name_and_place(case, tmp_path):
    table, rules, message = WRONG[case]
    with pytest.raises(InputError, match=message) as error:
        load_rules(write(tmp_path, table, rules))
    assert "rules file" in str(error.value) and "mine.toml" in str(error.value) and error.value.hint
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(["a = " + "[" * 5000, "[[rule]]\n[[rule]]", "rule = {}", "\ufeff"]))
def test_garbage_is_refused(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("rules") / "mine.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=r"rules file .*mine\.toml"):
        load_rules(str(path))


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("folder.toml", "bytes.toml", "missing.toml", "\0.toml", "x" * 300 + ".toml"):
        with pytest.raises(InputError, match="cannot read rules file"):
            load_rules(str(tmp_path / name))
    for name in ("", "Seed", "seed.json", "../seed", "a\nb", None, 5, SEED):
        with pytest.raises(InputError, match="unknown rules") as error:
            load_rules(name)
        assert "\n" not in str(error.value)


def test_own_rules_from_end_to_end(tmp_path):
    rules = [
        {"label": "looks_back", "metric": "mean_distance", "above": 2.0},
        {"label": "quiet", "metric": "entropy", "below": 0.7},
        {"label": "loud", "metric": "entropy", "above": 1.0},
    ]
    path = write(tmp_path, {"otherwise": "other"}, rules)
    result = headscope.analyze(build_family("bert"), ids=list(range(20, 32)), rules=path)
    assert result.rules.name == "mine"
    assert result.rules.thresholds == {"mean_distance": 2.0, "entropy": 0.7, "entropy:loud": 1.0}
    for head in result.heads:
        distance, entropy = head.metrics["mean_distance"], head.metrics["entropy"]
        expected = ["looks_back"] * (distance > 2) + ["quiet"] * (entropy < 0.7) + ["loud"] * (entropy > 1) + ["other"]
        assert (head.pattern, head.runner_up) == (expected[0], expected[1] if len(expected) > 1 else None)
        assert head.rest_pattern is None
    assert headscope.analyze(build_family("bert"), ids=list(range(20, 32)), rules=Path(path)).heads == result.heads


def test_rules_of_the_first_column_alone_have_no_rest(tmp_path):
    rules = load_rules(write(tmp_path, {}, [{"label": "attention_sink", "metric": "sink", "above": 0.0}]))
    assert rules.without_sink().rules == ()
    mixed = [
        {"label": "attention_sink", "metric": "entropy", "below": 1},
        {"label": "x", "metric": "sink", "above": 0},
        {"label": "y", "metric": "entropy_rest", "below": 1},
        {"label": "z", "metric": "special", "above": 0},
    ]
    rest = load_rules(write(tmp_path, {}, mixed)).without_sink()
    assert [(r.label, r.metric) for r in rest.rules] == [("y", "entropy_rest"), ("z", "special_rest")]


# ------------------------------------------------------------------ marks
@given(chance=st.floats(0.01, 1), share=st.floats(0, 2))
def test_a_metric_is_marked_where_it_is_no_better_than_chance(chance, share):
    value = chance * share
    for name in ("sink", "prev_token", "self_attend", "special", "max_weight", "prev_token_rest"):
        assert at_chance(name, value, chance) == (value <= chance * 1.005 + 1e-6)
    for name in ("entropy", "relative_entropy", "entropy_rest"):
        assert at_chance(name, value, chance) == (value >= chance * 0.995 - 1e-6)
    assert not at_chance("mean_distance", value, chance)
    assert not at_chance("sink", None, chance) and not at_chance("sink", value, None)


def test_adjusted_metrics_are_marked_at_zero():
    assert at_chance("sink_adjusted", 1e-8, 0.0) and at_chance("sink_adjusted", -0.5, 0.0)
    assert not at_chance("sink_adjusted", 0.01, 0.0)


@pytest.mark.parametrize("chance", [0.2, 1.0, 3.0])
def test_marks_leave_half_a_percent_of_slack_and_a_millionth_for_rounding(chance):
    for name, side in (("sink", 1), ("entropy", -1)):
        for away, marked in ((-0.006, True), (0.0, True), (0.004, True), (0.00501, False), (0.006, False)):
            assert at_chance(name, chance * (1 + side * away), chance) is marked
        assert at_chance(name, side * 1e-6, 0.0) is True and at_chance(name, side * 1.1e-6, 0.0) is False
    assert at_chance("mean_distance", chance, chance) is False
    assert at_chance("sink", None, chance) is False and at_chance("sink", chance, None) is False


def test_what_was_not_measured_is_no_runner_up(tmp_path):
    """Also where any value would do."""
    sides = [{"label": n, "metric": n, "above": 0.5} for n in ("sink", "prev_token", "self_attend")]
    rules = load_rules(write(tmp_path, {"choose": "largest", "runner_up_above": -1.0}, sides))
    assert rules.label({"sink": 0.9, "prev_token": None, "self_attend": -0.5}) == ("sink", "self_attend")
    assert rules.label({"sink": 0.9}) == ("sink", None)
    assert rules.label({"sink": 0.9, "self_attend": -1.0}) == ("sink", None)


def test_rule_sets_are_values():
    assert isinstance(SEED, RuleSet) and load_rules("seed") == SEED != CALIBRATED
    assert hash(SEED) == hash(load_rules("seed"))
