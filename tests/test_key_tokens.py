"""Which tokens are the same, which came after them, what merges to a word, and what is punctuation: by plain loops."""

from __future__ import annotations

import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.attention.visibility import Visibility
from headscope.capture.feed import Axis
from headscope.capture.key_tokens import (
    REPEATS,
    SUCCESSORS,
    KeyTokens,
    is_punctuation,
    merged,
    punctuation,
)
from headscope.capture.uniform import UniformRows
from headscope.heads.catalogue.kinds import OTHER_SPECIAL, PUNCTUATION, key_tokens
from headscope.models.batches import TokenSequence, axis_of

CPU = torch.device("cpu")


def tokens_of(texts, special=(), padding=0):
    """Texts of token numbers, padded on the right with a number that may be a token's."""
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[padding] * (width - len(text))] for text in texts])
    marks = torch.tensor([[n in special and i < len(t) for i, n in enumerate([*t, *[padding] * (width - len(t))])]
                          for t in texts])  # fmt: skip
    return KeyTokens(ids, marks, torch.tensor([len(t) for t in texts]), {})


def related(name, text, special):
    """Cells in a relation, by the definition: (row, key)."""
    cells = set()
    for row, own in enumerate(text):
        for earlier in range(row):
            if own in special or text[earlier] != own:
                continue
            after = earlier + 1
            if name == REPEATS:
                cells.add((row, earlier))
            elif text[after] != own and text[after] not in special:
                cells.add((row, after))
    return cells


texts = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=24), min_size=1, max_size=3)
specials = st.sets(st.integers(0, 5), max_size=2)


@settings(max_examples=150, deadline=None)
@given(texts, specials, st.integers(0, 5), st.sampled_from([REPEATS, SUCCESSORS]), st.data())
def test_cells_are_those_of_plain_loops(texts, special, padding, name, data):
    tokens = tokens_of(texts, special, padding)
    width = tokens.ids.shape[1]
    expected = {(e, *cell) for e, text in enumerate(texts) for cell in related(name, text, special)}
    cuts = [sorted(data.draw(st.tuples(*[st.integers(0, width)] * 2))) for _ in range(2)]
    for rows, keys in ([(0, width)] * 2, cuts):
        part = {c for c in expected if rows[0] <= c[1] < rows[1] and keys[0] <= c[2] < keys[1]}
        grid = tokens.cells(name, slice(*rows), slice(*keys))
        assert grid.shape == (len(texts), rows[1] - rows[0], keys[1] - keys[0])
        assert {(e, r + rows[0], k + keys[0]) for e, r, k in grid.nonzero().tolist()} == part
        for _ in range(2):  # the second time it is remembered
            listed = torch.stack(tokens.listed(name, slice(*rows), slice(*keys)), dim=1).tolist()
            assert {tuple(cell) for cell in listed} == part and len(listed) == len(part)


def test_a_token_over_and_over_has_repeats_and_no_successors():
    tokens, whole = tokens_of([[4, 4, 4]]), slice(0, 3)
    assert tokens.cells(REPEATS, whole, whole).sum() == 3
    assert not tokens.cells(SUCCESSORS, whole, whole).any()
    with pytest.raises(KeyError):
        tokens.cells("neighbours", whole, whole)


def test_padding_stands_in_no_relation():
    """Though its number is that of a token: neither as a row nor as a key."""
    tokens, whole = tokens_of([[7, 3, 7], [7, 3, 7, 3, 7, 3]], padding=7), slice(0, 6)
    for name, count in ((REPEATS, 1), (SUCCESSORS, 1)):
        cells = tokens.cells(name, whole, whole)
        assert not cells[0, 3:].any() and not cells[0, :, 3:].any() and cells[0].sum() == count


def test_little_is_remembered_of_a_text_that_repeats_itself(monkeypatch):
    monkeypatch.setattr("headscope.capture.key_tokens._REMEMBERED", 100)
    tokens = tokens_of([[1] * 40])
    found = [tokens.listed(REPEATS, slice(start, start + 8), slice(0, 40)) for start in range(0, 40, 8)]
    assert sum(len(cells) for cells, _, _ in found) == 40 * 39 // 2
    assert sum(len(cells) for cells, _, _ in tokens._known.values()) <= 100


def test_what_is_remembered_is_found_once(monkeypatch):
    monkeypatch.setattr("headscope.capture.key_tokens._REMEMBERED", 3)
    tokens = tokens_of([[1] * 3])
    assert len(tokens.listed(REPEATS, slice(0, 3), slice(0, 3))[0]) == 3
    assert tokens.listed(REPEATS, slice(0, 3), slice(0, 3)) is tokens.listed(REPEATS, slice(0, 3), slice(0, 3))
    other = tokens.listed(REPEATS, slice(1, 3), slice(0, 3))
    assert tokens.listed(REPEATS, slice(1, 3), slice(0, 3)) is not other, "there was no more room"


def test_tokens_move_to_another_device_together():
    there = torch.device("meta")
    tokens = KeyTokens(torch.tensor([[1, 2]]), torch.tensor([[False, True]]), torch.tensor([2]), {})
    tokens.marks["odd"] = tokens.ids % 2 == 1
    moved = tokens.to(there)
    assert {t.device for t in (moved.ids, moved.special, moved.lengths, moved.marks["odd"])} == {there}
    assert (moved.ids.shape, moved.lengths.shape, [*moved.marks]) == ((1, 2), (1,), ["odd"])
    assert tokens.to(CPU) is tokens and tokens.ids.device == CPU


def test_a_word_without_pieces_is_like_no_other():
    tokens = tokens_of([[5, 5, 7, 5]])
    words = merged(tokens, torch.tensor([[0, 2, -1, 3]]), torch.tensor([4]), torch.zeros(1, 4, dtype=torch.bool))
    assert words.ids.tolist() == [[0, -1, 0, 0]]
    last = merged(tokens, torch.tensor([[0, 1, -1, -1]]), torch.tensor([2]), torch.zeros(1, 2, dtype=torch.bool))
    assert last.ids.tolist() == [[0, 0]], "what is left out is in no word, the last one either"


@settings(max_examples=80, deadline=None)
@given(texts, specials, st.booleans(), st.booleans(), st.sampled_from([None, 3]), st.integers(0, 9))
def test_counts_are_of_what_a_row_sees(texts, special, causal, padded, window, first_row):
    tokens = tokens_of(texts, special)
    width = tokens.ids.shape[1]
    seen = torch.ones(len(texts), 1, width, width, dtype=torch.bool)
    if padded:
        seen &= (torch.arange(width) < tokens.lengths[:, None])[:, None, None]
    if window:
        seen = seen.triu(1 - window)
    view = Visibility(width, width, causal, seen if padded or window else None)
    first_row = min(first_row, width - 1)
    valid = (torch.arange(width) < tokens.lengths[:, None])[:, None]
    for first_key in (0, 1):
        rows = UniformRows(
            first_row, valid[..., first_row:], view, tokens.special, tokens.lengths, False, first_key, tokens=tokens
        )
        for name in (REPEATS, SUCCESSORS):
            for e, text in enumerate(texts):
                cells = {(r, k) for r, k in related(name, text, special) if seen[e, 0, r, k] and k >= first_key}
                found = rows.counts_of(name)[e, 0].tolist()
                assert found == [sum(r == row for r, _ in cells) for row in range(first_row, width)]


# ------------------------------------------------------------------ words
def test_words_are_the_same_where_all_pieces_are():
    """[CLS] un+able , able un+able un+happy [SEP], and a shorter text in the same batch."""
    ids = torch.tensor([[1, 5, 6, 9, 6, 5, 6, 5, 7, 2], [1, 9, 9, 6, 2, 0, 0, 0, 0, 0]])
    groups = torch.tensor([[0, 1, 1, 2, 3, 4, 4, 5, 5, 6], [0, 1, 1, 2, 3, -1, -1, -1, -1, -1]])
    special, marks = (ids == 1) | (ids == 2), {"comma": ids == 9, "able": ids == 6}
    axis = Axis(torch.tensor([10, 5]), special, KeyTokens(ids, special, torch.tensor([10, 5]), marks))
    found = axis.grouped(groups)
    assert found.lengths.tolist() == [7, 4]
    assert found.special.tolist() == [[True, *[False] * 5, True], [True, False, False, True, *[False] * 3]]
    words = found.tokens
    same = [[words.ids[0, i] == words.ids[0, j] for j in range(7)] for i in range(7)]
    assert [(i, j) for i in range(7) for j in range(i) if same[i][j]] == [(4, 1)]
    assert words.ids[1, 2] == words.ids[0, 3] and words.ids[1, 0] == words.ids[0, 0]
    assert words.ids[1, 1] not in words.ids[0].tolist(), "two commas are another word than one"
    assert words.marks["comma"].nonzero().tolist() == [[0, 2], [1, 1]]
    assert words.marks["able"].nonzero().tolist() == [[0, 3], [1, 2]], "of a word all pieces must be of the kind"
    assert words.cells(REPEATS, slice(0, 7), slice(0, 7)).nonzero().tolist() == [[0, 4, 1]]
    assert words.cells(SUCCESSORS, slice(0, 7), slice(0, 7)).nonzero().tolist() == [[0, 4, 2]]


def test_layers_share_one_axis_of_words():
    ids = torch.tensor([[1, 2, 3]])
    axis = Axis(torch.tensor([3]), ids < 0, KeyTokens(ids, ids < 0, torch.tensor([3]), {}))
    first = axis.grouped(torch.tensor([[0, 0, 1]]))
    assert axis.grouped(torch.tensor([[0, 0, 1]])) is first
    assert axis.grouped(torch.tensor([[0, 1, 1]])) is not first
    assert axis.grouped(torch.tensor([[-1, 0, 1]])).lengths.tolist() == [2]


@settings(max_examples=60, deadline=None)
@given(texts, st.data())
def test_every_token_its_own_word_changes_nothing(texts, data):
    tokens = tokens_of(texts)
    tokens.marks["odd"] = tokens.ids % 2 == 1
    width = tokens.ids.shape[1]
    groups = torch.where(torch.arange(width) < tokens.lengths[:, None], torch.arange(width), -1)
    words = merged(tokens, groups, tokens.lengths, tokens.special)
    for name in (REPEATS, SUCCESSORS):
        assert torch.equal(words.cells(name, *[slice(0, width)] * 2), tokens.cells(name, *[slice(0, width)] * 2))
    assert torch.equal(words.marks["odd"], tokens.marks["odd"] & (groups >= 0))


# ------------------------------------------------------------------ kinds
@pytest.mark.parametrize(
    "label",
    [
        ".",
        ",",
        "...",
        "--",
        "—",
        "«",
        "“”",
        "。",
        "、",
        "¿",
        "(",
        "_",
        "%",
        " . ",
        "↵",
        "↵↵",
        "␍↵",
        "⇥",
        ".↵",
        "।",
        "؟",
    ],
)
def test_punctuation(label):
    assert is_punctuation(label)


@pytest.mark.parametrize(
    "label",
    ["", " ", "a", "a.", ".a", "3", "1.5", "$", "+", "=", "^", "`", "é", "中", "🙂", "␣", "⟨E4⟩", "²", "\u0301"],
)
def test_no_punctuation(label):
    assert not is_punctuation(label)


@given(st.text(max_size=4))
def test_punctuation_is_what_unicode_says(label):
    inside = label.strip()
    expected = inside != "" and all(unicodedata.category(c).startswith("P") or c in "↵␍⇥" for c in inside)
    assert is_punctuation(label) == expected


def test_kinds_of_a_padded_batch():
    labels = ("<s>", "a", ",", "</s>", "b", "</s>")
    long = TokenSequence((1, 7, 8, 2, 9, 2), (True, False, False, True, False, True), labels, tuple(range(6)))
    short = TokenSequence((7, 2), (False, True), (".", "…"), (0, 1))
    axis = axis_of([long, short], padding=2)
    tokens = key_tokens(axis)
    assert tokens.marks[OTHER_SPECIAL].nonzero().tolist() == [[0, 3], [0, 5], [1, 1]]
    assert tokens.marks[PUNCTUATION].nonzero().tolist() == [[0, 2], [1, 0]], "what is special is of no other kind"
    assert torch.equal(punctuation(axis.labels, axis.special), tokens.marks[PUNCTUATION])
    assert tokens.to(CPU) is tokens and tokens.lengths.tolist() == [6, 2]
