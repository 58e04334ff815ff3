"""What is refused as attention weights and what is noted of them, and blocks of rows, on matrices made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.building import build_family
from headscope.attention.streaming import StreamedWeights
from headscope.attention.tiles import Terms
from headscope.attention.visibility import Visibility
from headscope.capture import feed
from headscope.capture.feed import (
    Axis,
    Findings,
    Matrix,
    Unreadable,
    blocks,
    check,
    check_streamed,
    fit,
    mass_of,
    matrix_of,
    readable,
    regroup,
)
from headscope.capture.key_tokens import KeyTokens
from headscope.capture.layerwise import Call
from headscope.capture.streaming import StreamedCall
from headscope.errors import ModelError
from headscope.models.sites import find_sites

SITE = find_sites(build_family("bert"))[1]
WITH_SINK = next(s for s in find_sites(build_family("gpt_oss")) if s.has_sink)


def axis(*lengths: int) -> Axis:
    return Axis(torch.tensor(lengths), torch.zeros(len(lengths), max(lengths), dtype=torch.bool))


def given_weights(weights: torch.Tensor, *lengths: int, site=SITE) -> tuple[Call, Matrix]:
    """A call and its matrix, in which rows see all keys that are real."""
    own = axis(*lengths)
    seen = own.valid[:, None, None, :].expand(-1, 1, own.special.shape[1], -1)
    return Call(site, 0, weights, None), Matrix(weights, seen, own, own, own.valid[:, None])


def even(*lengths: int, heads: int = 2) -> torch.Tensor:
    """Each row spread over the real keys of its text."""
    real = axis(*lengths).valid.float()
    return (real / real.sum(dim=-1, keepdim=True))[:, None, None, :].repeat(1, heads, max(lengths), 1)


def found_in(weights: torch.Tensor, *lengths: int, site=SITE, causal: bool = False) -> Findings:
    findings = Findings.none()
    check(*given_weights(weights, *lengths, site=site), findings, causal)
    return findings


# ------------------------------------------------------------------ sums of rows
def test_rows_of_attention_pass_without_a_word() -> None:
    for weights in (even(4, 2), even(1), even(3).bfloat16(), torch.eye(3).repeat(2, 2, 1, 1)):
        lengths = (4, 2) if len(weights) == 2 and weights.shape[-1] == 4 else (weights.shape[-1],) * len(weights)
        assert found_in(weights, *lengths).warnings() == []


@pytest.mark.parametrize(
    ("dtype", "total", "refused"),
    [
        (torch.float32, 1.0008, False),
        (torch.float32, 1.0012, True),
        (torch.float32, 0.9992, False),
        (torch.float32, 0.9988, True),
        (torch.bfloat16, 1.0234375, False),
        (torch.bfloat16, 1.0390625, True),
        (torch.bfloat16, 0.9765625, False),
        (torch.bfloat16, 0.9609375, True),
    ],
)
def test_one_row_that_does_not_sum_to_one_is_enough(dtype: torch.dtype, total: float, refused: bool) -> None:
    weights = torch.eye(4).repeat(2, 2, 1, 1).to(dtype)
    weights[1, 1, 2, 2] = total
    if not refused:
        assert found_in(weights, 4, 4).warnings() == []
        return
    with pytest.raises(Unreadable, match="are not attention weights") as caught:
        found_in(weights, 4, 4)
    assert f"sums to {total:.3g}" in caught.value.message and "(layer 1)" in caught.value.message


def test_the_sum_that_is_too_large_is_named_beside_one_that_is_too_small() -> None:
    weights = torch.eye(4).repeat(1, 1, 1, 1)
    weights[0, 0, 0, 0], weights[0, 0, 1, 1] = 0.5, 3.0
    with pytest.raises(Unreadable, match=r"a row sums to 3$"):
        found_in(weights, 4)


def test_rows_of_padding_may_hold_anything() -> None:
    weights = even(4, 2)
    weights[1, :, 2:] = torch.nan
    assert found_in(weights, 4, 2).warnings() == []
    weights[1, :, 2:] = 7.0
    assert found_in(weights, 4, 2, causal=False).warnings() == []
    weights[1, 0, 1, 0] = torch.nan
    with pytest.raises(ModelError, match=r"\(layer 1\) returned NaN attention weights") as caught:
        found_in(weights, 4, 2)
    assert not isinstance(caught.value, Unreadable) and caught.value.hint


def test_what_a_learned_sink_takes_is_noted_on_average() -> None:
    weights = torch.eye(4).repeat(1, 2, 1, 1) * 0.75
    weights[:, 1] = torch.eye(4) * 0.5
    findings = found_in(weights, 4, site=WITH_SINK)
    assert findings.unseen == {WITH_SINK.stack: [pytest.approx(0.375)]}
    (line,) = findings.warnings()
    assert line.startswith(f"{WITH_SINK.stack}: rows do not sum to one, on average 37.5% of the attention goes to")
    with pytest.raises(Unreadable, match=r"a row sums to 0\.5$"):
        found_in(weights, 4)
    few = torch.eye(4).repeat(1, 1, 1, 1) * 0.9995
    assert found_in(few, 4, site=WITH_SINK).unseen == {}
    with pytest.raises(Unreadable, match=r"a row sums to 1\.5$"):
        found_in(torch.eye(4).repeat(1, 1, 1, 1) * 1.5, 4, site=WITH_SINK)


def test_without_any_row_nothing_is_said() -> None:
    weights, own = torch.zeros(1, 2, 3, 3), axis(3)
    matrix = Matrix(weights, weights[:, :1] >= 0, own, own, torch.zeros(1, 1, 3, dtype=torch.bool))
    findings = Findings.none()
    check(Call(SITE, 0, weights, None), matrix, findings, False)
    assert findings == Findings.none() and findings.warnings() == []


# ------------------------------------------------------------------ padding
@pytest.mark.parametrize(
    ("shares", "refused"), [((0.0, 0.0, 0.0), 0), ((0.0027, 0.0, 0.0), 0), ((0.0036, 0.0, 0.0), 0.0012)]
)
def test_attention_to_padding_is_a_mean_over_heads(shares: tuple[float, ...], refused: float) -> None:
    weights = even(4, 2, heads=3)
    for head, share in enumerate(shares):
        weights[1, head, 1] = torch.tensor([1 - share, 0.0, share / 2, share / 2])
    if not refused:
        assert found_in(weights, 4, 2).warnings() == []
        return
    with pytest.raises(Unreadable, match=rf"\(layer 1\) looks at padding: up to {refused:.1%} of a row's") as caught:
        found_in(weights, 4, 2)
    assert "--stack" in caught.value.hint


def test_padding_that_only_padding_looks_at_is_no_matter() -> None:
    weights = even(4, 2)
    weights[1, :, 2:] = torch.tensor([0.0, 0.0, 0.5, 0.5])
    assert found_in(weights, 4, 2).warnings() == []
    own = axis(4, 2)
    seen = own.valid[:, None, None, :].expand(-1, 1, 4, -1)
    nothing = Matrix(weights * 0, seen, own, own, torch.zeros(2, 1, 4, dtype=torch.bool))
    check(Call(SITE, 0, weights * 0, None), replace(nothing, query=axis(4, 4)), Findings.none(), False)


# ------------------------------------------------------------------ later tokens
def test_one_later_key_of_a_real_row_is_a_leak() -> None:
    weights = torch.eye(4).repeat(2, 2, 1, 1)
    assert found_in(weights, 4, 4, causal=True).leaks == {}
    weights[1, 1, 2] = torch.tensor([0.0, 0.0, 0.9999, 0.0001])
    assert found_in(weights, 4, 4).leaks == {}
    findings = found_in(weights, 4, 4, causal=True)
    assert findings.leaks == {"self": ["1"]}
    (line,) = findings.warnings()
    assert line.startswith("self: attention above the diagonal in a causal model (layers 1): ")
    findings.leaks["self"] += ["10", "2", "1"]
    assert "(layers 1, 2, 10)" in findings.warnings()[0]


def test_rows_of_padding_and_other_sequences_leak_nothing() -> None:
    weights = torch.eye(4).repeat(2, 2, 1, 1)
    weights[1, :, 2] = torch.tensor([0.0, 0.0, 0.5, 0.5])
    assert found_in(weights, 4, 2, causal=True).leaks == {}
    query, key = axis(2), axis(3)
    wide = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])[None, None]
    matrix = Matrix(wide, wide >= 0, query, key, query.valid[:, None])
    findings = Findings.none()
    check(Call(SITE, 0, wide, None), matrix, findings, True)
    assert findings.leaks == {}


# ------------------------------------------------------------------ streamed
def streamed(view: Visibility, *, sinks: float | None = None, broken: bool = False, batch: int = 1) -> StreamedCall:
    torch.manual_seed(0)
    query = torch.randn(batch, 2, view.rows, 4)
    key = torch.randn(batch, 2, view.keys, 4)
    if broken:
        query[0, 0, 0] = torch.nan
    terms = Terms(1.0, sinks=None if sinks is None else torch.full((1, 2, 1), sinks))
    weights = StreamedWeights(query, key, key, view, terms)
    return StreamedCall(SITE, 0, weights, 2, 4)


def noted(call: StreamedCall, view: Visibility, query: Axis, key: Axis, causal: bool = False) -> Findings:
    findings = Findings.none()
    check_streamed(call, view, query, key, findings, causal)
    return findings


def test_streamed_rows_pass_or_are_no_numbers() -> None:
    view = Visibility(4, 4)
    assert noted(streamed(view), view, axis(4), axis(4)) == Findings.none()
    with pytest.raises(ModelError, match=r"\(layer 1\) returned NaN attention weights"):
        noted(streamed(view, broken=True), view, axis(4), axis(4))


def test_what_a_streamed_sink_takes_is_noted() -> None:
    view = Visibility(4, 4)
    call = streamed(view, sinks=1.0)
    taken = float(1 - call.weights.total().mean())
    assert taken > 0.1 and noted(call, view, axis(4), axis(4)).unseen == {"self": [pytest.approx(taken)]}
    assert noted(streamed(view, sinks=-9.0), view, axis(4), axis(4)).unseen == {}


@pytest.mark.parametrize("length", [3, 2, 1])
def test_streamed_rows_that_look_at_padding_are_refused(length: int) -> None:
    """Where the model's own mask let them: what is then left out of the view is not known of its weights."""
    whole, own = Visibility(4, 4), axis(4, length)
    call = streamed(whole, batch=2)
    lost = call.weights.rows(range(4))[1, :, :length, length:].sum(dim=-1).mean(dim=0).max()
    with pytest.raises(Unreadable, match=rf"looks at padding: up to {float(lost):.1%} of a row's"):
        noted(call, whole.within(own.valid), own, own)


def test_streamed_rows_that_look_at_no_padding_pass() -> None:
    whole, own = Visibility(4, 4), axis(4, 2)
    hidden = whole.within(own.valid)
    assert noted(streamed(hidden, batch=2), hidden, own, own) == Findings.none()
    assert noted(streamed(hidden, batch=2), hidden.within(own.valid), own, own) == Findings.none()
    # Rows of padding may look wherever they like.
    narrow = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    narrow[1, :, 2:, 2:] = False
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[1, :, :2, 2:] = False
    loose = Visibility(4, 4, open=mask)
    assert noted(streamed(loose, batch=2), Visibility(4, 4, open=mask & narrow), own, own) == Findings.none()


def test_streamed_rows_that_may_look_ahead_are_leaks() -> None:
    own = axis(4, 2)
    below = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    one_more = below.clone()
    one_more[..., 1, 2] = True
    late = below.clone().repeat(2, 1, 1, 1)
    late[1, :, 2, 3] = True
    for view, leaks in (
        (Visibility(4, 4, causal=True), False),
        (Visibility(4, 4, open=below), False),
        (Visibility(4, 4, open=one_more), True),
        (Visibility(4, 4), True),
        (Visibility(4, 4, open=late), False),  # a row of padding
    ):
        for causal in (True, False):
            found = noted(streamed(view, batch=2), view, own, own, causal).leaks
            assert found == ({"self": ["1"]} if leaks and causal else {})
    wide = Visibility(2, 4)
    assert noted(streamed(wide), wide, axis(2), axis(4), True).leaks == {}


# ------------------------------------------------------------------ shapes
def test_calls_that_are_no_matrix_a_text_are_refused() -> None:
    call, _ = given_weights(even(4, 2, heads=3), 4, 2)
    readable(call, 2)
    with pytest.raises(Unreadable, match=r"attention of shape \(2, 3, 4, 4\) for a batch of 3"):
        readable(call, 3)
    with pytest.raises(Unreadable, match="more than once in one forward pass"):
        readable(replace(call, number=SITE.call + 1), 2)
    with pytest.raises(Unreadable, match=r"shape \(2, 4, 4\) for a batch of 2"):
        readable(replace(call, weights=call.weights[:, 0]), 2)


def test_modules_whose_rows_are_no_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = given_weights(even(4, 2), 4, 2)
    kind = type(SITE.module).__name__
    monkeypatch.setitem(feed.ROWS_ARE_NOT_TOKENS, kind, "looks at pools")
    with pytest.raises(Unreadable, match=rf"^{SITE.path} \({kind}\) looks at pools$"):
        readable(call, 2)


@pytest.mark.parametrize(("query", "key"), [((4, 2), (5, 2)), ((3, 2), (4, 2)), ((4, 2, 1), (4, 2, 1))])
def test_rows_and_columns_are_those_of_tokens(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    call, _ = given_weights(even(4, 2, heads=3), 4, 2)
    fit(call, axis(4, 2), axis(4, 2))
    said = f"for {query[0]} query and {key[0]} key tokens in a batch of {len(query)}"
    for refuse in (fit, matrix_of):
        with pytest.raises(Unreadable, match=said):
            refuse(call, axis(*query), axis(*key))
    with pytest.raises(Unreadable, match="not one row and one column a token"):
        fit(replace(call, weights=call.weights[:, 0]), axis(4, 2), axis(4, 2))


# ------------------------------------------------------------------ blocks
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 3), st.sampled_from([1, 13, 40, 1 << 19]))
def test_blocks_are_as_large_as_they_may_be(lengths: list[int], heads: int, cells: int) -> None:
    _, matrix = given_weights(even(*lengths, heads=heads).bfloat16(), *lengths)
    size = max(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "BLOCK_CELLS", cells)
        parts = list(blocks(matrix, False))
    row = len(lengths) * heads * size
    assert [p.first_row for p in parts] == list(np.cumsum([0, *(p.size for p in parts[:-1])]))
    assert all(p.size * row <= cells or p.size == 1 for p in parts)
    assert all((p.size + 1) * row > cells for p in parts[:-1]) and sum(p.size for p in parts) == size
    assert torch.equal(torch.cat([p.weights for p in parts], dim=2), matrix.weights.float())
    assert torch.equal(torch.cat([p.valid for p in parts], dim=2), matrix.valid)
    assert {p.weights.dtype for p in parts} == {torch.float32} and {p.first_key for p in parts} == {0}


def test_mass_is_a_sum_over_heads_in_float32() -> None:
    weights = torch.rand(2, 5, 3, 4).bfloat16()
    assert mass_of(weights).dtype == torch.float32
    assert np.allclose(mass_of(weights).numpy(), weights.float().numpy().sum(axis=1))


# ------------------------------------------------------------------ words
def test_a_word_is_special_where_one_of_its_pieces_is() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    special = torch.tensor([[True, False, False, False], [False, False, True, False]])
    own = Axis(torch.tensor([4, 3]), special, KeyTokens(ids, special, torch.tensor([4, 3]), {}))
    words = own.grouped(torch.tensor([[0, 0, 1, 2], [0, 1, 1, -1]]))
    assert words.lengths.tolist() == [3, 2]
    assert words.special.tolist() == [[True, False, False], [False, True, False]]
    assert Axis(torch.tensor([4, 3]), special).grouped(torch.tensor([[0, 0, 1, 2], [0, 1, 1, -1]])).tokens is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 3), min_size=5, max_size=5), min_size=1, max_size=2), st.booleans())
def test_words_sum_their_keys_and_average_their_rows(groups: list[list[int]], renormalise: bool) -> None:
    torch.manual_seed(0)
    own, grid = axis(*[5] * len(groups)), torch.tensor(groups)
    weights = torch.rand(len(groups), 2, 5, 5).softmax(dim=-1)
    seen = torch.rand(len(groups), 1, 5, 5) < 0.6
    matrix = Matrix(weights, seen, own, own, own.valid[:, None])
    found = regroup(matrix, (grid, grid), renormalise)
    count = max(int(grid.max()) + 1, 1)
    assert found.weights.shape == (len(groups), 2, count, count)
    for b, row in enumerate(groups):
        members = [[i for i, g in enumerate(row) if g == word] for word in range(count)]
        plain = np.zeros((2, count, count))
        for q, k in np.ndindex(count, count):
            cells = weights[b][:, members[q]][:, :, members[k]].double().numpy()
            plain[:, q, k] = cells.sum(axis=(1, 2)) / max(len(members[q]), 1)
        left = plain.sum(axis=-1)
        if renormalise:
            plain = plain / np.where(left > 0, left, 1)[..., None]
            real = np.arange(count) <= max(row)
            assert np.array_equal(found.valid[b].expand(2, -1).numpy(), (left > 0) & real)
        assert np.allclose(found.weights[b].numpy(), plain, atol=1e-6)
        for q, rows in enumerate(members):
            for k, columns in enumerate(members):
                assert bool(found.visible[b, 0, q, k]) == any(bool(seen[b, 0, i, j]) for i in rows for j in columns)
