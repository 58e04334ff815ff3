"""How alike heads are: against SciPy on the model's own matrices, on made rows, and on heads that are known."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import jensenshannon, squareform
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    T5Config,
    T5Model,
)

from fixtures.circuits import INDUCTION_LAYERS, induction_model
from headscope.attention.visibility import Visibility
from headscope.capture.blocks import StreamedRows
from headscope.errors import InputError
from headscope.heads.catalogue import similarity_rows
from headscope.heads.catalogue.clustering import average_linkage, classical_scaling
from headscope.heads.catalogue.probing import Probing
from headscope.heads.catalogue.similarity import REDUNDANT, pair_divergences, similarity
from headscope.heads.catalogue.similarity_result import Similarity, groups_of
from headscope.models.inputs import prepare
from headscope.models.loading import wrap_model
from headscope.models.selection import parse_selection
from headscope.models.sites import find_sites

IDS = [list(np.random.default_rng(n).integers(3, 40, n)) for n in (9, 14)]
SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
ALL = 10_000
# The square root makes a rounding error of 1e-7 one of 3e-4 where rows are nearly equal, which no two here are.
CLOSE = 1e-5


def build(kind):
    torch.manual_seed(0)
    models = {
        "bert": lambda: BertModel(BertConfig(**SMALL, initializer_range=0.5)),
        "gpt2": lambda: GPT2Model(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, initializer_range=0.5)),
        "llama": lambda: LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=2, initializer_range=0.5)),
        "mistral": lambda: MistralModel(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=4)),
    }
    return models[kind]().eval()


def probing(model, tokenizer=None, head=None, **options):
    sites = find_sites(model)
    return Probing(wrap_model(model, tokenizer), sites, sites, parse_selection("head", head), **options)


def measured(model, ids, *, max_rows=ALL, batch_size=None, **options):
    probe = probing(model, **options)
    prepared = prepare(probe.loaded, ids=[[int(i) for i in row] for row in ids], batch_size=batch_size)
    return similarity(probe, prepared, max_rows=max_rows)


def own_matrices(model, ids):
    """The model's own weights of one text, float64 (layer * head, query, key)."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(input_ids=torch.tensor([[int(i) for i in ids]]), output_attentions=True).attentions
    model.set_attn_implementation(before)
    return torch.cat([w[0] for w in found]).double().numpy()


def by_scipy(matrices):
    """Root of the mean squared distance over all rows that see two keys or more; (head, head)."""
    rows = [w[:, i] for w in matrices for i in range(w.shape[1]) if (w[:, i] > 0).sum(axis=1).max() >= 2]
    squares = [[[jensenshannon(a, b, base=2) ** 2 for b in row] for a in row] for row in rows]
    return np.sqrt(np.nan_to_num(np.mean(squares, axis=0)))


# ------------------------------------------------------------------ distances
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "mistral"])
@pytest.mark.parametrize("engine", ["streaming", "layerwise", "full"])
def test_distances_are_those_of_scipy_on_the_models_own_matrices(kind, engine):
    """Two texts in one batch: padding does not count, nor does a first row that sees itself only."""
    model = build(kind)
    found, _ = measured(model, IDS, engine=engine)
    assert found.heads == tuple(("self", layer, head) for layer in range(2) for head in range(4))
    expected = by_scipy([own_matrices(model, ids) for ids in IDS])
    off = ~np.eye(8, dtype=bool)
    assert np.allclose(found.distance[off], expected[off], atol=CLOSE, rtol=0)
    assert (np.diag(found.distance) == 0).all() and (found.distance == found.distance.T).all()
    assert found.rows == sum(map(len, IDS)) - (0 if kind == "bert" else len(IDS))


def test_several_batches_give_the_same_as_one():
    model = build("gpt2")
    one, several = (measured(model, IDS * 2, batch_size=size)[0] for size in (4, 1))
    assert one.rows == several.rows == 42
    assert np.allclose(one.distance, several.distance, atol=1e-3)


@given(count=st.integers(1, 7), keys=st.integers(1, 600), seed=st.integers(0, 2**31), sharp=st.sampled_from([1, 8, 60]))
@settings(max_examples=25, deadline=None)
def test_divergences_of_any_rows(count, keys, seed, sharp):
    draw = np.random.default_rng(seed)
    rows = draw.random((count, keys)) ** sharp * (draw.random((count, keys)) < 0.7)
    rows[:, draw.integers(keys)] += 0.1
    rows /= rows.sum(axis=1, keepdims=True)
    found = pair_divergences(torch.from_numpy(rows))
    expected = np.array([[jensenshannon(a, b, base=2) ** 2 for b in rows] for a in rows])
    assert np.allclose(found, np.nan_to_num(expected), atol=3e-6)


def test_equal_rows_have_no_distance_and_rows_without_a_common_key_the_largest():
    rows = torch.tensor([[0.3, 0.7, 0.0, 0.0], [0.3, 0.7, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    found = pair_divergences(rows.double())
    assert found[0, 1] == 0
    assert found[0, 2:] == pytest.approx([1, 1], abs=1e-6) and found[2, 3] == pytest.approx(1, abs=1e-6)


def test_a_head_and_its_copy_are_redundant():
    """L1H3 gets the queries and keys of L1H0, so it attends as that does; nothing else changes."""
    model = build("bert")
    attention = model.encoder.layer[1].attention.self
    for linear in (attention.query, attention.key):
        linear.weight.data[12:16], linear.bias.data[12:16] = linear.weight.data[:4], linear.bias.data[:4]
    found, more = measured(model, IDS)
    assert found.distance[4, 7] == 0
    assert found.redundant[0] == (("self", 1, 0), ("self", 1, 3), 0.0)
    assert found.clusters[4] == found.clusters[7]
    assert found.position[4] == pytest.approx(found.position[7], abs=1e-6)
    (record,) = more.evidence["self", 1, 3]
    assert (record.type, record.score, record.claimed, record.low) == ("redundant", 0.0, True, 0.0)
    assert record.high == pytest.approx(0, abs=1e-6)
    assert record.details["partner"] == "L1H0" and record.details["same_layer"] is True
    assert more.summary["redundant_pairs"] == len(found.redundant)
    claimed = {place for place, (r,) in more.evidence.items() if r.claimed}
    assert claimed == {head for a, b, _ in found.redundant for head in (a, b)}


def test_heads_of_known_kinds():
    """In the constructed circuit heads of one kind are alike, and others are as far as their descriptions say."""
    circuit = induction_model()
    probe = probing(circuit.model, circuit.tokenizer)
    prepared = prepare(probe.loaded, texts="the cat sat on the mat . the dog sat on the cat .")
    found, more = similarity(probe, prepared)
    kinds = [kind for layer in INDUCTION_LAYERS for kind in layer]
    own = [circuit.heads[layer, head] for _, layer, head in found.heads]
    assert own == kinds
    for i, a in enumerate(own):
        for j, b in enumerate(own):
            if a == b:
                assert found.distance[i, j] < 0.01
    ones = {kind: own.index(kind) for kind in own}
    # No row looks at the first token and at the one before itself but the second one.
    rows = found.rows
    assert found.distance[ones["first_token"], ones["previous_token"]] ** 2 == pytest.approx(1 - 1 / rows, abs=1e-2)
    (record,) = more.evidence["self", *found.heads[ones["first_token"]][1:]]
    assert record.alternative is not None and record.alternative[0] == "first_token"
    assert record.alternative[1] == pytest.approx(0, abs=0.05)
    if record.claimed:
        assert record.example is not None and record.example.keys[0].position == 0


def test_trivial_heads_are_those_of_the_description():
    model = build("gpt2")
    _, more = measured(model, IDS[:1])
    weights = own_matrices(model, IDS[0])[:, 1:]
    first, even = np.zeros(weights.shape[1:]), np.tril(np.ones((9, 9)))[1:]
    first[:, 0] = 1
    even /= even.sum(axis=1, keepdims=True)
    for (_, layer, head), (record,) in more.evidence.items():
        away = [
            np.sqrt(
                np.mean([jensenshannon(a, b, base=2) ** 2 for a, b in zip(weights[4 * layer + head], t, strict=True)])
            )
            for t in (first, even)
        ]
        assert record.alternative == (
            ("first_token", "uniform")[int(np.argmin(away))],
            pytest.approx(min(away), abs=1e-5),
        )


def test_records_give_the_nearest_head_and_an_interval_around_its_distance():
    found, more = measured(build("llama"), IDS)
    for i, head in enumerate(found.heads):
        (record,) = more.evidence[head]
        others = np.delete(found.distance[i], i)
        assert record.score == others.min() and record.eligible == found.rows
        assert record.low < record.score < record.high
        assert record.details["median_distance"] == np.median(others)
        assert record.claimed == (record.score < REDUNDANT)


# ------------------------------------------------------------------ what compares
def test_encoder_and_decoder_do_not_compare_and_cross_attention_is_left_out():
    torch.manual_seed(0)
    model = T5Model(T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=2)).eval()
    probe = probing(model)
    tensors = {"input_ids": torch.arange(3, 12)[None], "decoder_input_ids": torch.arange(3, 10)[None]}
    found, more = similarity(probe, prepare(probe.loaded, tensors=tensors))
    stacks = np.array([stack for stack, _, _ in found.heads])
    assert set(stacks) == {"encoder", "decoder"} and any("cross" in note for note in more.notes)
    assert (np.isfinite(found.distance) == (stacks[:, None] == stacks)).all()
    assert [set(stacks[group]) for group in found.groups()] == [{"encoder"}, {"decoder"}]
    assert not set(np.array(found.clusters)[stacks == "encoder"]) & set(np.array(found.clusters)[stacks == "decoder"])
    stored = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert stored["distance"][0][-1] is None and stored["distance"][0][0] == 0


def test_selected_heads_only():
    found, _ = measured(build("bert"), IDS, head="1,3")
    whole, _ = measured(build("bert"), IDS)
    assert [head for _, _, head in found.heads] == [1, 3, 1, 3]
    index = [whole.heads.index(head) for head in found.heads]
    assert np.allclose(found.distance, whole.distance[np.ix_(index, index)], atol=1e-6)


@pytest.mark.parametrize(("ids", "rows", "head", "says"), [
    (IDS, 0, None, "max_rows is 0"),
    ([[5]], 9, None, "no row of this input sees two tokens"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(ids, rows, head, says):
    with pytest.raises(InputError, match=says):
        measured(build("gpt2"), ids, max_rows=rows, head=head)


def test_one_head_compares_with_none():
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=4))
    with pytest.raises(InputError, match="fewer than two"):
        measured(model, IDS, head="2")


# ------------------------------------------------------------------ the sample
def test_the_sample_is_drawn_by_its_seed_and_leaves_other_random_numbers_alone():
    model = build("bert")
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, again, other = (measured(model, IDS, max_rows=6, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(state[0], torch.get_rng_state()) and (state[1] == np.random.get_state()[1]).all()
    assert one.rows == 6
    assert (one.distance == again.distance).all() and not np.allclose(one.distance, other.distance, atol=1e-3)


@pytest.mark.parametrize("engine", ["streaming", "layerwise"])
def test_no_more_is_kept_than_the_bound(monkeypatch, engine):
    """Eight heads and rows of at most 14 keys: a bound of 8 * 40 weights leaves few rows, and still gives distances."""
    kept = []
    keep = similarity_rows._keep

    def watch(row, view, places, weights):
        keep(row, view, places, weights)
        kept.append(row.parts[-1].weights.numel())

    monkeypatch.setattr(similarity_rows, "_keep", watch)
    monkeypatch.setattr(similarity_rows, "CELLS", 8 * 40)
    found, _ = measured(build("gpt2"), IDS, engine=engine, batch_size=1)
    assert 0 < sum(kept) <= 8 * 40
    assert 2 <= found.rows < 21


def test_only_sampled_rows_are_made(monkeypatch):
    asked = []
    monkeypatch.setattr(StreamedRows, "blocks", lambda self: pytest.fail("all rows were made") if self else iter(()))
    own = similarity_rows.weights_at

    def watch(rows, positions):
        asked.append(list(positions))
        return own(rows, positions)

    monkeypatch.setattr(similarity_rows, "weights_at", watch)
    measured(build("llama"), IDS[1:], max_rows=5)
    assert [len(positions) for positions in asked] == [5, 5] and asked[0] == asked[1] and 0 not in asked[0]


def test_causal_rows_are_cut_behind_their_own_key():
    view = Visibility(10, 10, causal=True)
    assert [similarity_rows._end(view, i) for i in (1, 9)] == [2, 10]
    assert similarity_rows._end(Visibility(10, 12), 1) == 12


def test_what_goes_to_a_learned_sink_is_left_out():
    rows = torch.tensor([[0.2, 0.2, 0.1], [2e-4, 1e-4, 0.0]], dtype=torch.float64)
    found = similarity_rows.scaled(rows)
    assert found[0].tolist() == pytest.approx([0.4, 0.4, 0.2]) and bool(found[1].isnan().all())


# ------------------------------------------------------------------ clusters and the map
def points_of(seed, count):
    return np.random.default_rng(seed).normal(size=(count, 3))


def distances_of(points):
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


@given(seed=st.integers(0, 2**31), count=st.integers(2, 40), height=st.floats(0.1, 3.0))
@settings(max_examples=40, deadline=None)
def test_clusters_are_those_of_scipy(seed, count, height):
    distance = distances_of(points_of(seed, count))
    tree = average_linkage(distance)
    expected = linkage(squareform(distance, checks=False), method="average")
    assert [merge[2] for merge in tree.merges] == pytest.approx(expected[:, 2].tolist())
    assert sorted(tree.order()) == list(range(count))
    mine, theirs = np.array(tree.cut(height)), fcluster(expected, height, criterion="distance")
    assert ((mine[:, None] == mine) == (theirs[:, None] == theirs)).all()
    sizes = np.bincount(mine)
    assert (sizes > 0).all() and (np.diff(sizes) <= 0).all()
    ordered = mine[tree.order()]
    assert (np.diff(ordered) != 0).sum() == len(sizes) - 1


def test_things_in_one_place_are_one_cluster():
    assert average_linkage(np.zeros((4, 4))).cut(0.0) == [0, 0, 0, 0]
    assert average_linkage(np.zeros((1, 1))).order() == [0]


@given(seed=st.integers(0, 2**31), count=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_a_map_of_points_in_a_plane_keeps_their_distances(seed, count):
    points = points_of(seed, count)[:, :2]
    found = classical_scaling(distances_of(points))
    assert found.shape == (count, 2)
    assert distances_of(found) == pytest.approx(distances_of(points), abs=1e-6)


def test_a_map_does_not_depend_on_signs_of_eigenvectors(monkeypatch):
    points = points_of(3, 12) * [3, 2, 1]
    one = classical_scaling(distances_of(points))
    own = np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda a: (own(a)[0], -own(a)[1]))
    assert classical_scaling(distances_of(points)) == pytest.approx(one)
    assert (one[np.abs(one).argmax(axis=0), [0, 1]] > 0).all()


def test_groups_are_what_is_linked():
    linked = np.eye(5, dtype=bool)
    linked[0, 3] = linked[3, 0] = linked[3, 4] = linked[4, 3] = True
    assert [group.tolist() for group in groups_of(linked)] == [[0, 3, 4], [1], [2]]


def test_equal_distances_are_told_apart_by_nothing_else():
    found = Similarity((), np.zeros((0, 0)), (), (), 0.2, np.zeros((0, 2)), 0)
    assert replace(found, rows=3).to_dict()["heads"] == [] and found.groups() == []
