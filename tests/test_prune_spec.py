"""`--heads` is read exactly, and what cannot be read names what is valid; groups stay rectangles."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headscope.errors import InputError
from headscope.pruning.groups import Groups
from headscope.pruning.spec import GRAMMAR, Request, parse_heads, write_heads


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("5:0,3;7:1-4", [Request(None, 5, ((0, 0), (3, 3))), Request(None, 7, ((1, 4),))]),
        (" 5 : 0 , 3 ;\n7:1 - 4 ", [Request(None, 5, ((0, 0), (3, 3))), Request(None, 7, ((1, 4),))]),
        ("L5H3", [Request(None, 5, ((3, 3),))]),
        ("5:all", [Request(None, 5, None)]),
        ("encoder.0:1,3;cross.2:5", [Request("encoder", 0, ((1, 1), (3, 3))), Request("cross", 2, ((5, 5),))]),
        ("decoder.L2H0", [Request("decoder", 2, ((0, 0),))]),
        ("vision.encoder.layers.10:0", [Request("vision.encoder.layers", 10, ((0, 0),))]),
        (["0:1", "1:0;2:2"], [Request(None, layer, ((h, h),)) for layer, h in ((0, 1), (1, 0), (2, 2))]),
        ("0:1,1", [Request(None, 0, ((1, 1), (1, 1)))]),
    ],
)
def test_reads_what_the_contract_says(text, requests) -> None:
    assert list(parse_heads(text)) == requests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no heads are given"),
        (" ; ", "no heads are given"),
        ("0:", "'0:' in --heads names no head"),
        ("0:1;", "cannot read '' in --heads"),
        ("0:-1", "head -1 in '0:-1' is negative"),
        ("-1:0", "layer -1 in --heads is negative"),
        ("0-2:1", "'0-2:1' in --heads names several layers"),
        ("0,2:1", "'0,2:1' in --heads names several layers"),
        ("all:1", "'all:1' in --heads names several layers"),
        ("a:1", "cannot read the layer 'a'"),
        ("0:x", "cannot read the heads 'x' in '0:x'"),
        ("0:1,,2", "cannot read the heads '' in '0:1,,2'"),
        ("0:4-1", "cannot read the heads '4-1' in '0:4-1'"),
        ("0:all,1", "cannot read the heads 'all' in '0:all,1'"),
        ("0:1:2", "cannot read '0:1:2'"),
        ("5", "cannot read '5'"),
        ("L5", "cannot read 'L5'"),
        ("0:99999999999999999999", "cannot read the heads"),
        ("0:²", "cannot read the heads"),
    ],
)
def test_says_what_cannot_be_read_and_what_is_valid(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_heads(text, "Valid: layers 0-2, heads 0-3.")
    assert message in caught.value.message
    assert caught.value.hint is not None and caught.value.hint.endswith("Valid: layers 0-2, heads 0-3.")


def test_without_a_model_the_hint_is_the_grammar() -> None:
    for text in ("x", ["0:1", "x"]):
        with pytest.raises(InputError, match="cannot read 'x' in --heads") as caught:
            parse_heads(text)
        assert caught.value.hint == GRAMMAR


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 99))
def test_what_is_written_is_read_again(heads: set[int], layer: int) -> None:
    (request,) = parse_heads(f"{layer}:{write_heads(sorted(heads))}")
    assert request.layer == layer
    assert {h for low, high in request.heads for h in range(low, high + 1)} == heads


# ------------------------------------------------------------------ groups
groups = st.builds(lambda count, size: Groups(count * size, size), st.integers(1, 4), st.integers(1, 4))


def rectangular(shape: Groups, removed: set[int]) -> bool:
    """By definition: what is left can be numbered (group, place) with the same places in all groups that are left."""
    left = [sum(h // shape.size == g and h not in removed for h in range(shape.num_heads)) for g in range(shape.count)]
    return len({n for n in left if n}) <= 1


@given(groups, st.data())
def test_legal_plans_leave_a_rectangle(shape: Groups, data) -> None:
    removed = data.draw(st.sets(st.integers(0, shape.num_heads - 1)))
    assert shape.legal(removed) == rectangular(shape, removed)


@given(groups, st.data())
def test_fillers_are_as_few_as_can_be_also_in_two_steps(shape: Groups, data) -> None:
    """A second pruning finds among the heads still there what it needs, whatever the first one left."""
    every = list(range(shape.num_heads))
    first = data.draw(st.sets(st.sampled_from(every)))
    second = first | data.draw(st.sets(st.sampled_from(every)))
    present = set(every)
    for wanted in (first, second):
        stay = set(shape.fillers(wanted, present))
        gone = wanted - stay
        assert stay <= wanted & present
        assert rectangular(shape, gone)
        smallest = next(
            n
            for n in range(len(wanted) + 1)
            if any(rectangular(shape, wanted - set(c)) for c in combinations(wanted, n))
        )
        assert len(stay) == smallest
        present -= gone


@given(groups, st.data())
def test_every_plan_that_is_offered_is_legal(shape: Groups, data) -> None:
    removed = data.draw(st.sets(st.integers(0, shape.num_heads - 1)).filter(lambda r: not rectangular(shape, r)))
    for heads, _ in shape.nearest(removed):
        assert rectangular(shape, set(heads)) and 0 < len(heads) < shape.num_heads


@given(groups, st.booleans(), st.data())
def test_offers_are_all_that_are_legal_of_three_kinds(shape: Groups, fixed: bool, data) -> None:
    """By definition, for each group what it has lost, and the nearest offer first."""
    shape = replace(shape, fixed=fixed)
    gone = data.draw(st.sets(st.integers(0, shape.num_heads - 1)).filter(lambda r: not shape.legal(r)))
    heads = [set(range(g * shape.size, (g + 1) * shape.size)) for g in range(shape.count)]
    keep = min(len(group - gone) for group in heads if group - gone)
    wanted = {
        "whole groups": set().union(*(group for group in heads if group & gone)),
        "as many from every group": gone.union(*(sorted(g - gone)[: len(g - gone) - keep] for g in heads if g - gone)),
        "without the rest of the groups": set().union(*(group for group in heads if group <= gone)),
    }
    offers = shape.nearest(gone)
    for what, plan in wanted.items():
        offered = [tuple(sorted(plan))] if plan and len(plan) < shape.num_heads and shape.legal(plan) else []
        assert [h for h, said in offers if said == what] == offered or offered[0] in [h for h, _ in offers]
    away = [len(gone ^ set(plan)) for plan, _ in offers]
    assert away == sorted(away) and len({plan for plan, _ in offers}) == len(offers)
    assert {plan for plan, _ in offers} <= {tuple(sorted(plan)) for plan in wanted.values()}


def test_offers_the_rest_of_a_group_or_one_of_every_group() -> None:
    assert Groups(8, 2).nearest({0}) == [((0, 1), "whole groups"), ((0, 2, 4, 6), "as many from every group")]
    assert Groups(6, 2).nearest({0, 1, 2}) == [
        ((0, 1, 2, 3), "whole groups"),
        ((0, 1, 2, 4), "as many from every group"),
        ((0, 1), "without the rest of the groups"),
    ]


def test_where_all_go_the_first_that_is_there_stays() -> None:
    assert Groups(8, 2).placeholder(range(8)) == (0,) and Groups(8, 2).placeholder([7, 5, 3]) == (3,)


def test_runs_that_code_counts_on_all_stay() -> None:
    runs = Groups(8, 2, fixed=True)
    assert runs.legal({0, 2, 4, 6}) and not runs.legal({0, 1})
    assert runs.fillers({0, 1}, range(8)) == (0, 1)
    assert runs.placeholder(range(8)) == (0, 2, 4, 6)
