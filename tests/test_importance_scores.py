"""Scores in a file and back: nothing is lost on the way, and a damaged file is refused in one line."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headscope.capture.outputs import find_outputs
from headscope.errors import InputError
from headscope.importance.method import LayerScores
from headscope.importance.result import GroupScore, HeadScore, Importance, LayerCurve
from headscope.importance.scores import importance_result, read_scores, scored_from
from headscope.importance.surgeon import surgeon
from headscope.models.pruned import HeadState, set_pruned_state
from headscope.results import ModelInfo, Stack
from tests.single_head_cases import build, task_of, texts

INFO = ModelInfo(
    "a/model", "llama", "LlamaForCausalLM", "float32", "cpu", 3, 4, 2, 8, None, (Stack("self", (0, 1), (4, 4)),)
)
VERSIONS = {"headscope": "1", "torch": "2"}


def result_of(name: str) -> tuple[Importance, tuple, dict]:
    task = task_of(name, build(name), texts(), seed=7)
    scored = surgeon(task)
    result = importance_result(task, scored, model=INFO, method="surgeon", warnings=["careful"], versions=VERSIONS)
    return result, task.outputs, scored


RESULT, OUTPUTS, SCORED = result_of("llama")


def written(tmp_path, found) -> Importance:
    path = tmp_path / "scores.json"
    path.write_text(json.dumps(found, allow_nan=False))
    return read_scores(path)


def assert_same(found: dict[str, LayerScores], wanted, unit: str) -> None:
    assert set(found) == {name for u, name in wanted if u == unit}
    for name, layer in found.items():
        other = wanted[unit, name]
        assert layer.scores.dtype == np.float64 and (layer.scores == other.scores).all()
        assert layer.order == other.order and (layer.losses == other.losses).all() and layer.errors is None


# ------------------------------------------------------------------ there and back
def test_the_object_has_the_contracts_keys() -> None:
    found = RESULT.to_dict()
    assert found["schema"] == "headscope/importance@1" and found["method"] == "surgeon" and found["loss"] == "causal"
    assert (found["texts"], found["tokens"], found["seed"]) == (8, sum(map(len, texts())), 7)
    assert found["model"] == INFO.to_dict() and found["replace"] == "zero" and found["normalised"] is False
    assert found["warnings"] == ["careful"] and found["versions"] == VERSIONS
    assert [(h["stack"], h["layer"], h["head"]) for h in found["heads"]] == [
        ("self", i, h) for i in range(3) for h in range(4)
    ]
    assert found["heads"][5] == {
        "stack": "self",
        "layer": 1,
        "head": 1,
        "score": SCORED["head", "self.1"].scores[1],
        "error": None,
    }
    assert list(found["kv_groups"][3]) == ["stack", "layer", "kv_group", "heads", "score", "error"]
    assert found["kv_groups"][3]["kv_group"] == 1 and found["kv_groups"][3]["heads"] == [2, 3]
    assert {(c["layer"], c["unit"]) for c in found["curves"]} == {
        (i, u) for i in range(3) for u in ("head", "kv-group")
    }
    assert all(len(c["losses"]) == len(c["order"]) + 1 for c in found["curves"])


@pytest.mark.parametrize("name", ["llama", "t5", "albert"])
def test_a_file_gives_the_same_scores_again(name: str, tmp_path) -> None:
    result, outputs, scored = result_of(name)
    again = written(tmp_path, result.to_dict())
    assert again == result
    for unit in ("head", "kv-group"):
        assert_same(scored_from(again, outputs, unit), scored, unit)


def test_layers_that_share_a_module_share_their_scores() -> None:
    result, outputs, _ = result_of("albert")
    assert len(outputs) == 1 and [h.layer for h in result.heads] == [i for i in range(3) for _ in range(4)]
    by_layer = [[h.score for h in result.heads if h.layer == i] for i in range(3)]
    assert by_layer[0] == by_layer[1] == by_layer[2]
    assert [c.losses for c in result.curves if c.unit == "head"] == [result.curves[0].losses] * 3


def test_single_scores_have_errors_and_no_curve(tmp_path) -> None:
    task = task_of("llama", build("llama"), texts(), units=("head",))
    scored = {("head", o.name): LayerScores(np.arange(4.0) - i, np.full(4, 0.25)) for i, o in enumerate(task.outputs)}
    scored["head", "self.2"] = LayerScores(np.array([1, np.inf, 2, 3]), np.array([0.1, np.nan, 0.1, 0.1]))
    found = importance_result(task, scored, model=INFO, method="gradient").to_dict()
    assert found["curves"] == [] and found["kv_groups"] == []
    assert found["heads"][9]["score"] is None and found["heads"][9]["error"] is None
    found["heads"][9]["score"] = 5
    again = scored_from(written(tmp_path, found), task.outputs, "head")
    assert (again["self.1"].scores == scored["head", "self.1"].scores).all() and (again["self.1"].errors == 0.25).all()
    assert again["self.1"].losses is None and again["self.1"].order is None and again["self.2"].errors is None
    with pytest.raises(InputError, match="there are no scores of kv-groups"):
        scored_from(written(tmp_path, found), task.outputs, "kv-group")


def test_schema_method_and_heads_are_enough(tmp_path) -> None:
    heads = [{"stack": "self", "layer": i, "head": h, "score": i + h} for i in range(3) for h in range(4)]
    found = written(tmp_path, {"schema": "headscope/importance@1", "method": "mine", "heads": heads})
    assert found.method == "mine" and found.loss is None and found.curves == () and found.model.name == ""
    assert scored_from(found, OUTPUTS, "head")["self.2"].scores.tolist() == [2, 3, 4, 5]


# ------------------------------------------------------------------ to a model
def outputs_without(gone: tuple[int, ...]):
    model = build("llama")
    set_pruned_state(model.get_submodule("model.layers.1.self_attn"), HeadState(4, 2, 8, 8, zeroed=gone))
    return find_outputs(model)


def test_heads_that_are_gone_are_passed_over() -> None:
    curve = LayerCurve("self", 1, "head", (2, 0, 3, 1), (0.0, 1.0, 3.0, 7.0, 8.0))
    result = Importance(**vars(RESULT) | {"curves": (curve,)})
    last = scored_from(result, outputs_without((2, 0)), "head")["self.1"]
    # Heads 1 and 3 are left, 3 goes first.
    assert last.order == (1, 0) and last.losses.tolist() == [0, 4, 5]
    assert last.scores.tolist() == [SCORED["head", "self.1"].scores[h] for h in (1, 3)]
    middle = scored_from(result, outputs_without((0,)), "head")["self.1"]
    assert middle.order == (1, 2, 0) and middle.losses.tolist() == [0, 1, 5, 6]
    groups = scored_from(RESULT, outputs_without((0, 1, 2)), "kv-group")["self.1"]
    assert groups.scores.tolist() == [SCORED["kv-group", "self.1"].scores[1]] and groups.order == (0,)


def test_stacks_may_be_left_out(tmp_path) -> None:
    result, outputs, scored = result_of("t5")
    cross = [o for o in outputs if o.name.startswith("cross")]
    assert_same(
        scored_from(result, cross, "head"), {k: v for k, v in scored.items() if k[1].startswith("cross")}, "head"
    )


def changed(**changes) -> Importance:
    return Importance(**vars(RESULT) | changes)


@pytest.mark.parametrize(
    ("unit", "importance", "message"),
    [
        ("head", changed(heads=RESULT.heads[:-1]), r"lack head 3 of self\.2"),
        ("head", changed(heads=()), "no scores of heads"),
        ("head", changed(heads=RESULT.heads[:8]), r"lack head 0 of self\.2"),
        ("head", changed(heads=(*RESULT.heads, HeadScore("self", 3, 0, 1.0))), r"layer self\.3, which the model"),
        ("head", changed(heads=(*RESULT.heads, HeadScore("self", 1, 4, 1.0))), r"head 4 of self\.1, where there are 4"),
        ("kv-group", changed(kv_groups=RESULT.kv_groups[1:]), r"lack kv-group 0 of self\.0"),
        (
            "kv-group",
            changed(kv_groups=(GroupScore("self", 0, 0, (0,), 1.0), *RESULT.kv_groups[1:])),
            r"other heads in kv-group 0 of self\.0",
        ),
        (
            "head",
            changed(curves=(LayerCurve("self", 0, "head", (1, 2, 3), (0, 1, 2, 3)),)),
            r"curve of self\.0 does not",
        ),
    ],
)
def test_scores_of_another_model_are_refused(unit: str, importance: Importance, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        scored_from(importance, OUTPUTS, unit)
    assert error.value.hint and "\n" not in error.value.message


# ------------------------------------------------------------------ damaged files
def refused(path) -> InputError:
    with pytest.raises(InputError) as error:
        read_scores(path)
    assert "\n" not in error.value.message and error.value.hint and str(path) in error.value.message
    return error.value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "not an object"),
        (b"{}", "schema ''"),
        (b'{"schema": "headscope/prune@1"}', "schema 'headscope/prune@1', not headscope/importance@1"),
        (b'{"schema": 3}', "schema is 3"),
        (b'{"schema": "headscope/importance@1", "method": "x"}', "heads is None"),
        (b'{"schema": "headscope/importance@1", "heads": []}', "method is None"),
        (b'{"schema": "headscope/importance@1", "method": "x", "heads": [NaN]}', "NaN"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path) -> None:
    path = tmp_path / "scores.json"
    path.write_bytes(content)
    assert message in refused(path).message


def test_files_that_cannot_be_read_are_refused(tmp_path) -> None:
    assert "No such file" in refused(tmp_path / "none.json").message
    assert "cannot read" in refused(tmp_path).message


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("heads", 3, "score"), None, "heads[3]: score is None"),
        (("heads", 3, "score"), "high", "heads[3]: score is 'high'"),
        (("heads", 3, "score"), True, "heads[3]: score is True"),
        (("heads", 3, "score"), 10**400, "heads[3]: score is 1000"),
        (("heads", 3, "error"), [], "heads[3]: error is []"),
        (("heads", 3, "layer"), -1, "heads[3]: layer is -1"),
        (("heads", 3, "layer"), True, "heads[3]: layer is True"),
        (("heads", 3, "head"), 2, "has the head ('self', 0, 2) twice"),
        (("heads", 3), 5, "heads is"),
        (("kv_groups", 1, "kv_group"), 0, "has the kv-group ('self', 0, 0) twice"),
        (("kv_groups", 1, "heads"), [1.5], "kv_groups[1]: heads is [1.5]"),
        (("curves", 0, "unit"), "layer", "curves[0]: unit is 'layer'"),
        (("curves", 0, "order"), [0, 1, 1, 2], "curves[0] does not have each unit once"),
        (("curves", 0, "losses"), [0.0, 1.0], "curves[0] does not have each unit once"),
        (("curves", 0, "losses", 0), 0.5, "curves[0] does not have each unit once"),
        (("curves", 0, "losses", 1), "x", "curves[0]: losses is"),
        (("model", "num_heads"), "four", "model: num_heads is 'four'"),
        (("model",), [], "model is []"),
        (("versions",), {"torch": 2}, "versions is"),
        (("warnings",), "careful", "warnings is 'careful'"),
        (("loss",), 1, "loss is 1"),
        (("normalised",), 1, "normalised is 1"),
    ],
)
def test_the_place_of_what_is_wrong_is_named(place, value, message: str, tmp_path) -> None:
    found = json.loads(json.dumps(RESULT.to_dict()))
    at = found
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    path = tmp_path / "scores.json"
    path.write_text(json.dumps(found))
    assert message in refused(path).message


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_refused_or_does_no_harm(data, tmp_path) -> None:
    """Either it is an error in one line, or what is read has the right types and only finite numbers."""
    found = copy.deepcopy(json.loads(json.dumps(RESULT.to_dict())))
    at = found
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    if data.draw(st.booleans()):
        del at[key]
    else:
        at[key] = data.draw(ANYTHING)
    path = tmp_path / "scores.json"
    path.write_text(json.dumps(found))
    try:
        again = read_scores(path)
    except InputError as error:
        assert "\n" not in error.message and error.hint
        return
    assert all(math.isfinite(s.score) and s.layer >= 0 for s in (*again.heads, *again.kv_groups))
    assert all(isinstance(s.stack, str) for s in (*again.heads, *again.kv_groups, *again.curves))
    assert json.dumps(again.to_dict(), allow_nan=False)
    try:
        scored = scored_from(again, OUTPUTS, "head")
    except InputError:
        return
    assert all(len(s.scores) == 4 and np.isfinite(s.scores).all() for s in scored.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 4000))
def test_a_file_cut_short_is_refused(cut: int, tmp_path) -> None:
    path = tmp_path / "scores.json"
    whole = json.dumps(RESULT.to_dict())
    path.write_text(whole[: min(cut, len(whole) - 1)])
    refused(path)
