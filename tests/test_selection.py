"""The grammar of layers and heads: what it selects, and that nothing else gets through."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headscope.errors import InputError
from headscope.models.selection import parse_selection, ranges

numbers = st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True).map(sorted)
item = st.one_of(
    st.integers(-12, 30).map(lambda n: (str(n), n, n)),
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: (f"{p[0]}-{p[0] + p[1]}", p[0], p[0] + p[1])),
)


@given(available=numbers, items=st.lists(item, min_size=1, max_size=5), blank=st.sampled_from(["", " ", "\t"]))
def test_what_is_selected_is_what_is_written(available, items, blank):
    selection = parse_selection("layer", f"{blank},{blank}".join(text for text, _, _ in items) + blank)
    wanted = set()
    for _, low, high in items:
        if low < 0:
            wanted |= {available[low]} if -low <= len(available) else set()
        else:
            wanted |= set(range(low, high + 1))
    assert selection.within(available) == tuple(n for n in available if n in wanted)


@given(available=st.lists(numbers, min_size=1, max_size=3), items=st.lists(item, min_size=1, max_size=4))
def test_what_exists_nowhere_is_refused_with_what_does(available, items):
    """A range may pass over numbers that do not exist, but must hold one that does and end where they end."""
    selection = parse_selection("layer", ",".join(text for text, _, _ in items))
    valid = sorted({n for a in available for n in a})

    def exists(low, high):
        if low < 0:
            return any(-low <= len(a) for a in available)
        return high <= max(valid) and any(low <= n <= high for n in valid)

    missing = [text for text, low, high in items if not exists(low, high)]
    if not missing:
        selection.check(available, "the model")
        return
    with pytest.raises(InputError) as error:
        selection.check(available, "the model")
    # `5-5` is written as 5.
    first, _, last = missing[0].partition("-") if not missing[0].startswith("-") else (missing[0], "", "")
    asked = first if last in ("", first) else missing[0]
    assert str(error.value) == f"layer {asked} does not exist in the model"
    assert error.value.hint == f"Valid layers: {ranges(valid)}; -1 is the last."


def test_the_ends_of_what_exists():
    """Both ends count, from the front and from the back, in the longest list."""
    for text, chosen in {"3": (3,), "11": (11,), "-1": (11,), "-4": (3,), "3-11": (3, 5, 7, 11), "0-3": (3,)}.items():
        selection = parse_selection("layer", text)
        selection.check([[3, 5, 7, 11], [3]], "it")
        assert selection.within([3, 5, 7, 11]) == chosen
    for text in ("2", "12", "-5", "3-12", "8-10", "0-2"):
        with pytest.raises(InputError, match=f"layer {text} does not exist in it"):
            parse_selection("layer", text).check([[3, 5, 7, 11], [3]], "it")
    assert parse_selection("layer", "-4").within([3]) == ()


@given(numbers)
def test_ranges_read_back_as_what_they_were(given_numbers):
    text = ranges(given_numbers)
    assert parse_selection("head", text).within(range(40)) == tuple(given_numbers)
    assert parse_selection("head", given_numbers).within(range(40)) == tuple(given_numbers)
    assert "-" not in text or len(given_numbers) > 1


def test_all_and_none_select_all_and_check_nothing():
    for value in ("all", " all ", None):
        selection = parse_selection("head", value)
        assert selection.within([2, 5]) == (2, 5) and selection.within([]) == ()
        selection.check([], "anywhere")


@given(st.text(max_size=20) | st.text("0123456789-, all", max_size=12))
def test_any_text_is_read_or_refused(text):
    try:
        selection = parse_selection("head", text)
    except InputError as error:
        assert str(error).startswith("cannot read --head ") and "\n" not in str(error) and error.hint
    else:
        assert set(text) <= set("0123456789-, \tal\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0") or text.strip() == "all"
        selection.within(range(12))


DIGITS = ["9" * 10, "9" * 5000, "1-" + "9" * 5000, "²", "٣", "५", "1_0", "1e3", "0x1", "1.0", "+3"]
HOSTILE = [*DIGITS, "", " ", ",", "5,", ",5", "1-", "-", "--1", "1--2", "-2-3", "3-1", "- 1", "5\n6", "ALL", "all,1",
           "[red]5", "5;6", "5:0", "L5", "\0"]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_text_is_refused_in_one_short_line(text):
    with pytest.raises(InputError, match="cannot read --layer ") as error:
        parse_selection("layer", text)
    assert "\n" not in str(error.value) and "\0" not in str(error.value) and len(str(error.value)) < 80


def test_white_space_is_ignored():
    assert parse_selection("layer", " 3 - 5 , 7,\t-1 ").within(range(12)) == (3, 4, 5, 7, 11)


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        (1, 2),
        {1, 2},
        range(1, 3),
        np.array([1, 2]),
        torch.tensor([1, 2]),
        [np.int64(1), np.uint8(2)],
        iter([1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_come_in_any_container(value):
    assert parse_selection("head", value).within(range(4)) == (1, 2)


@pytest.mark.parametrize(
    "value", [3, np.int64(3), np.array(3), torch.tensor(3)], ids=lambda value: type(value).__name__
)
def test_one_number_of_any_library(value):
    assert parse_selection("head", value).within(range(4)) == (3,)


@pytest.mark.parametrize("value", [[], (), 1.0, [1.0], True, [True], ["1"], [[1]], object(), torch.tensor(1.5), [None]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(InputError, match="cannot read --head"):
        parse_selection("head", value)
