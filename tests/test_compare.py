"""Two models compared: with themselves, with heads moved or removed, and against SciPy on the models' own matrices."""

from __future__ import annotations

import copy
import json
import random
import weakref
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from scipy.spatial.distance import jensenshannon
from tiny_checkpoints import save, tiny_model
from transformers import AutoModel

import headscope
from fixtures.tokenizers import image_processor, word_level
from headscope.comparison import texts
from headscope.comparison.distances import divergence
from headscope.errors import InputError
from headscope.models.sites import find_sites
from headscope.models.weights import read_weights, write_weights

RNG = np.random.default_rng(0)
IDS = [[int(i) for i in RNG.integers(5, 300, n)] for n in (9, 14, 14, 6)]
ALL = 10_000
SENTENCES = ["the cat sat on the mat", "a dog saw it because it was tired", "it was tired and so was the cat"]


def build(family, seed=0, **changes):
    """A tiny model whose heads differ much more than initial weights make them."""
    wide = {"gpt2": {"initializer_range": 0.5}, "bert": {"initializer_range": 0.5}, "llama": {"initializer_range": 0.5}}
    model = tiny_model(family, **wide.get(family, {}), **changes)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * seed * torch.randn_like(parameter)
    return model


def shuffled(model, span=None, seed=3):
    """The same function with heads in another order within each layer, and the place that each head went to.

    Args:
        span: Heads that share keys and values stay together: only runs of so many are shuffled.
    """
    moved, rng, places = copy.deepcopy(model), np.random.default_rng(seed), {}
    for site in find_sites(moved):
        weights = read_weights(site, model=moved).clone()
        count = len(weights.query)
        size = span or count
        order = np.concatenate([start + rng.permutation(size) for start in range(0, count, size)])
        roles = ("query", "output", "query_bias") if span else [f.name for f in fields(weights)]
        taken = {
            name: old[order].clone()
            for name in roles
            if name != "output_bias" and (old := getattr(weights, name)) is not None
        }
        write_weights(site, replace(weights, **taken), model=moved)
        # Place n holds what was head order[n].
        places |= {(site.stack, site.layer, int(head)): n for n, head in enumerate(order)}
    return moved, places


def matrices(model, ids):
    """The model's own weights of one text, a float64 (head, query, key) a layer."""
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    return [w[0].double().numpy() for w in found]


def by_scipy(a, b, first):
    """Root of the mean squared distance over rows of all texts, each of which is from position `first` on."""
    squares = [jensenshannon(p, q, base=2) ** 2 for p, q in zip(a, b, strict=True) for p, q in zip(p, q, strict=True)]
    squares = [
        s for s, position in zip(squares, [i for m in a for i in range(len(m))], strict=True) if position >= first
    ]
    return np.sqrt(np.mean(squares))


# ------------------------------------------------------------------ a model with itself
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("engine", ["streaming", "layerwise"])
def test_a_model_with_itself_is_all_zeros(family, engine):
    model = build(family)
    found = headscope.compare(model, model, ids=IDS, engine=engine)
    assert len(found.heads) == 8 and found.rows > 20
    for head in found.heads:
        assert head.distance == 0 and not head.changed and head.pattern_a == head.pattern_b
        assert set(head.delta.values()) == {0.0} and not any(map(head.clear, head.delta))
        assert all((s.low, s.high, s.sd) == (0, 0, 0) for s in head.spread.values())
    assert [(m.a, m.b, m.similarity) for m in found.matching] == [
        ((h.layer, h.head),) * 2 + (1.0,) for h in found.heads
    ]
    assert found.removed == ({}, {})


def test_heads_that_are_equal_stay_where_they_are():
    """All heads of a layer the same: any order is a best matching, and ours is theirs."""
    model = build("bert")
    for site in find_sites(model):
        weights = read_weights(site, model=model).clone()
        same = {n: getattr(weights, n)[:1].expand_as(getattr(weights, n)).clone() for n in ("query", "key")}
        same |= {f"{n}_bias": torch.zeros_like(getattr(weights, f"{n}_bias")) for n in ("query", "key")}
        write_weights(site, replace(weights, **same), model=model)
    found = headscope.compare(model, model, ids=IDS)
    assert found.between[0].distance[:4, :4].max() < 1e-6
    assert all(m.a == m.b for m in found.matching)


# ------------------------------------------------------------------ heads that moved
@pytest.mark.parametrize(("family", "span"), [("bert", None), ("gpt2", None), ("llama", 2)])
def test_the_matching_finds_a_permutation(family, span):
    model = build(family)
    moved, places = shuffled(model, span)
    with torch.no_grad():
        outputs = [m(input_ids=torch.tensor(IDS[:1])).last_hidden_state for m in (model, moved)]
    assert torch.allclose(*outputs, atol=1e-4)
    found = headscope.compare(model, moved, ids=IDS)
    assert {("self", *m.a): m.b for m in found.matching} == {p: (p[1], n) for p, n in places.items()}
    assert any(m.a != m.b for m in found.matching)
    assert max(m.distance for m in found.matching) < 2e-3
    for head in found.heads:
        stays = places["self", head.layer, head.head] == head.head
        assert stays == (head.distance < 1e-3)


def test_layers_may_differ_in_number_and_heads_too():
    """The first two of four layers are the student's: their heads are found among all of them, either way."""
    teacher = build("bert", num_hidden_layers=4, num_attention_heads=4)
    student = build("bert", num_hidden_layers=2, num_attention_heads=4)
    state = teacher.state_dict()
    student.load_state_dict({name: state[name] for name in student.state_dict()})
    for models, sizes in (((student, teacher), (8, 16)), ((teacher, student), (16, 8))):
        found = headscope.compare(*models, ids=IDS)
        assert found.between[0].distance.shape == sizes and len(found.heads) == 16
        assert sorted((m.a, m.b) for m in found.matching) == [((n, h), (n, h)) for n in (0, 1) for h in range(4)]
        assert all(m.distance == 0 for m in found.matching)
        there, missing = ("pattern_b", "pattern_a") if models[0] is student else ("pattern_a", "pattern_b")
        for head in found.heads:
            assert getattr(head, there) is not None
            assert (getattr(head, missing) is None) == (head.layer > 1) == (head.distance is None)
            assert set(head.delta.values()) == ({None} if head.layer > 1 else {0.0})
            assert not head.changed
    fewer = headscope.compare(build("bert", num_attention_heads=2), teacher, ids=IDS)
    assert len(fewer.matching) == 4 and len({m.b for m in fewer.matching}) == 4


# ------------------------------------------------------------------ against SciPy
@pytest.mark.parametrize(("family", "first"), [("bert", 0), ("gpt2", 1)])
def test_distances_are_scipys(family, first):
    a, b = build(family), build(family, seed=2)
    found = headscope.compare(a, b, ids=IDS, max_rows=ALL)
    assert found.rows == sum(len(ids) - first for ids in IDS)
    of_a, of_b = ([matrices(model, ids) for ids in IDS] for model in (a, b))
    table = np.array(
        [
            [
                by_scipy([t[la][ha] for t in of_a], [t[lb][hb] for t in of_b], first)
                for lb, hb in found.between[0].heads_b
            ]
            for la, ha in found.between[0].heads_a
        ]
    )
    np.testing.assert_allclose(found.between[0].distance, table, atol=1e-4)
    np.testing.assert_allclose([h.distance for h in found.heads], table.diagonal(), atol=1e-5)
    assert table.diagonal().min() > 0.02
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(table)
    assert [(m.a, m.b) for m in found.matching] == [
        (found.between[0].heads_a[i], found.between[0].heads_b[j]) for i, j in zip(rows, columns, strict=True)
    ]


def test_a_sample_of_rows_is_drawn_from_all_texts_and_with_the_seed():
    a, b = build("bert"), build("bert", seed=1)
    whole = headscope.compare(a, b, ids=IDS, max_rows=ALL)
    some = [headscope.compare(a, b, ids=IDS, max_rows=20, seed=seed) for seed in (1, 1, 2)]
    assert [s.rows for s in some] == [20, 20, 20]
    distances = [[h.distance for h in found.heads] for found in (whole, *some)]
    assert distances[1] == distances[2] != distances[3]
    assert distances[1] == pytest.approx(distances[0], rel=0.4)


@given(arrays(np.float64, (2, 5), elements=st.floats(0, 1, width=32)).filter(lambda p: p.sum(axis=1).min() > 0.1))
@settings(deadline=None)
def test_divergence_is_scipys_and_zero_only_for_equal_rows(rows):
    rows = rows / rows.sum(axis=1, keepdims=True)
    p, q = torch.tensor(rows)
    assert float(divergence(p, p)) == 0
    assert float(divergence(p, q)) == float(divergence(q, p))
    assert float(divergence(p, q)) == pytest.approx(jensenshannon(*rows, base=2) ** 2, abs=1e-7)


def test_divergence_keeps_the_digits_of_nearly_equal_rows():
    p = torch.full((4,), 0.25, dtype=torch.float64)
    d = torch.tensor([1e-6, -1e-6, 0, 0], dtype=torch.float64)
    # To second order it is the sum of d² / (8 p), in nats.
    assert float(divergence(p, p + d)) == pytest.approx(2e-12 / 2 / np.log(2), rel=1e-3)
    assert torch.isnan(divergence(p, p * torch.nan))


# ------------------------------------------------------------------ metrics
def test_differences_are_those_of_each_text():
    a, b = build("gpt2"), build("gpt2", seed=1)
    found = headscope.compare(a, b, ids=IDS[:2], metrics="all")
    alone = [[headscope.analyze(m, ids=[ids], metrics="all") for ids in IDS[:2]] for m in (a, b)]
    both = [headscope.analyze(m, ids=IDS[:2], metrics="all") for m in (a, b)]
    for i, head in enumerate(found.heads):
        assert head.pattern_a == both[0].heads[i].pattern and head.pattern_b == both[1].heads[i].pattern
        assert head.metrics_a == both[0].heads[i].metrics and head.metrics_b == both[1].heads[i].metrics
        assert head.changed == (head.pattern_a != head.pattern_b)
        for name, mean in head.delta.items():
            values = [[text.heads[i].metrics[name] for text in model] for model in alone]
            if None in values[0] + values[1]:
                continue
            each = np.subtract(values[1], values[0])
            assert mean == pytest.approx(each.mean(), abs=1e-6)
            # Of two values the interval is Student's own: there is no skewness to widen it.
            half = stats.t.ppf(0.975, 1) * each.std(ddof=1) / np.sqrt(2)
            spread = head.spread[name]
            assert (spread.low, spread.high) == pytest.approx((mean - half, mean + half), abs=2e-5)
            assert head.clear(name) == (not spread.low <= 0 <= spread.high)
    assert any(head.changed for head in found.heads)


def test_pairs_make_intervals_narrower_than_the_texts_are_apart():
    """What one text has of a metric and another has not is in both models, and falls out."""
    ids = [[int(i) for i in np.random.default_rng(n).integers(5, 300, n)] for n in range(4, 34, 2)]
    a = build("gpt2")
    b = copy.deepcopy(a)
    for parameter in b.parameters():
        parameter.data *= 1.001
    found = headscope.compare(a, b, ids=ids)
    single = headscope.analyze(a, ids=ids)
    for head, record in zip(found.heads, single.heads, strict=True):
        assert head.spread["sink"].sd < 0.1 * record.spread["sink"].sd


# ------------------------------------------------------------------ pruned models
def test_pruned_heads_are_listed_in_original_numbers():
    model = build("bert")
    smaller = copy.deepcopy(model)
    headscope.prune_heads(smaller, {0: [1], 1: [0, 2]})
    found = headscope.compare(model, smaller, ids=IDS)
    assert found.removed == ({}, {"self.0": (1,), "self.1": (0, 2)})
    gone = {(0, 1), (1, 0), (1, 2)}
    for head in found.heads:
        assert (head.pattern_b is None) == (head.distance is None) == ((head.layer, head.head) in gone)
        assert head.pattern_a is not None
        if head.layer == 0 and head.in_both:
            assert head.distance < 1e-6
        elif head.in_both:
            assert 0 < head.distance < 1
    assert {m.b for m in found.matching} == {(h.layer, h.head) for h in found.heads} - gone
    assert {(m.a, m.b) for m in found.matching if m.a[0] == 0} == {((0, h), (0, h)) for h in (0, 2, 3)}
    back = headscope.compare(smaller, model, ids=IDS)
    assert back.removed == found.removed[::-1] and len(back.heads) == 8
    assert json.loads(json.dumps(found.to_dict()))["removed"] == {"a": {}, "b": {"self.0": [1], "self.1": [0, 2]}}


def test_heads_zeroed_to_keep_groups_even_are_removed_too():
    model = build("llama")
    smaller = copy.deepcopy(model)
    headscope.prune_heads(smaller, {0: [1]}, ragged="mask")
    state = next(s.module.headscope_heads for s in find_sites(smaller) if s.layer == 0)
    assert state.gone == (1,) and state.zeroed == (1,)
    found = headscope.compare(model, smaller, ids=IDS)
    assert found.removed[1] == {"self.0": (1,)} and found.head(0, 1).pattern_b is None
    assert (0, 1) not in {m.b for m in found.matching}


# ------------------------------------------------------------------ tokens
def test_other_tokens_have_no_distance(tmp_path):
    words = sorted({w for s in SENTENCES for w in s.split()})
    plain = word_level(words)
    framed = word_level(words, around=True)
    one = save(tmp_path / "one", "bert", plain)
    two = save(tmp_path / "two", "bert", framed)
    found = headscope.compare(one, two, SENTENCES)
    assert all(h.distance is None for h in found.heads) and found.matching == () and found.rows == 0
    assert all(None not in h.delta.values() and h.spread for h in found.heads)
    (warning,) = [w for w in found.warnings if "other tokens" in w]
    assert "3 of 3 texts" in warning and "--words" in warning
    # Without special tokens both read the same words.
    again = headscope.compare(one, two, SENTENCES, words=True, exclude_special=True)
    assert again.rows and len(again.matching) == 8 and not any("other tokens" in w for w in again.warnings)
    assert all(h.distance is not None for h in again.heads)


def test_words_of_other_pieces_compare(tmp_path):
    """The same words cut into other pieces, in a model that reads both: merged, they have rows in both."""
    from fixtures.tokenizers import build_tokenizer

    pieces, words = (
        build_tokenizer("wordpiece"),
        word_level(sorted({w for s in SENTENCES for w in s.split()}), around=True),
    )
    size = {"vocab_size": max(len(pieces), len(words))}
    one = save(tmp_path / "one", "bert", pieces, **size)
    two = save(tmp_path / "two", "bert", words, **size)
    cut = [pieces.tokenize(s) for s in SENTENCES]
    assert any(len(tokens) != len(s.split()) for tokens, s in zip(cut, SENTENCES, strict=True))
    found = headscope.compare(one, two, SENTENCES, words=True)
    assert found.rows and len(found.matching) == 8
    assert headscope.compare(one, two, SENTENCES).rows < found.rows


def test_only_texts_cut_alike_count(tmp_path):
    tokenizer = word_level(sorted({w for s in SENTENCES for w in s.split()}))
    one = save(tmp_path / "one", "gpt2", tokenizer)
    two = save(tmp_path / "two", "gpt2", tokenizer, n_positions=7)
    found = headscope.compare(one, two, SENTENCES, max_rows=ALL)
    assert found.rows == len(SENTENCES[0].split()) - 1
    assert any("2 of 3 texts" in w and "--max-length" in w for w in found.warnings)
    assert headscope.compare(one, two, SENTENCES, max_rows=ALL, max_length=7).rows == 5 + 6 + 6


# ------------------------------------------------------------------ stacks and inputs
def test_encoder_decoders_compare_stack_by_stack(tmp_path):
    tokenizer = word_level(sorted({w for s in SENTENCES for w in s.split()}), around=True)
    one = save(tmp_path / "one", "bart", tokenizer)
    two = tmp_path / "two"
    model = AutoModel.from_pretrained(one)
    moved, places = shuffled(model)
    moved.save_pretrained(two)
    tokenizer.save_pretrained(two)
    found = headscope.compare(one, two, SENTENCES, decoder_texts="a cat")
    assert {h.stack for h in found.heads} == {"encoder", "decoder", "cross"} and len(found.between) == 3
    assert {(m.stack, *m.a): m.b[1] for m in found.matching if m.stack == "encoder"} == {
        p: n for p, n in places.items() if p[0] == "encoder"
    }
    assert all(h.distance is not None for h in found.heads)
    chosen = headscope.compare(one, two, SENTENCES, decoder_texts="a cat", stack="cross", layer=-1, head=[0, 1])
    assert [(h.stack, h.layer, h.head) for h in chosen.heads] == [("cross", 1, 0), ("cross", 1, 1)]


def test_what_the_first_decoder_writes_both_read(tmp_path):
    tokenizer = word_level(sorted({w for s in SENTENCES for w in s.split()}), around=True)
    cat, dog = tokenizer.convert_tokens_to_ids(["cat", "dog"])
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, word in zip(paths, (cat, dog), strict=True):
        model = tiny_model("bart", generating=True)
        model.final_logits_bias[0, word] = 100
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    found = headscope.compare(*paths, SENTENCES[:1])
    (warning,) = [w for w in found.warnings if "generated" in w]
    assert "cat" in warning and "dog" not in warning and str(paths[0]) in warning
    # But for what they write they are one model.
    assert {h.distance for h in found.heads} == {0.0} and {h.stack for h in found.heads} >= {"decoder", "cross"}


def test_images_compare():
    model = tiny_model("vit")
    image = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    found = headscope.compare(model, model, images=[image], processor=image_processor(16))
    assert found.rows == 5 and {h.distance for h in found.heads} == {0.0} and len(found.matching) == 8


def test_the_only_stacks_compare_whatever_they_are_called():
    found = headscope.compare(build("bert"), tiny_model("gpt2"), ids=IDS)
    assert {h.stack for h in found.heads} == {"self"} and all(h.in_both for h in found.heads)
    with pytest.raises(InputError, match="nothing to compare: one model has self, the other encoder"):
        headscope.compare(build("bert"), tiny_model("bart", generating=True), ids=IDS[:1])


def test_a_corpus_is_read_up_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "MOST_TEXTS", 5)
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(json.dumps({"body": f"text {i}"}) for i in range(9)) + '\n{"body": 3}\n')
    none = dict.fromkeys(("texts", "ids", "images", "audio"))
    found, notes = texts.small_corpus(file, "body", None, 0, none)
    assert len(found) == 5 and found == sorted(found) and notes[0] == "5 of 9 texts were drawn"
    assert any("skipped" in note for note in notes)
    assert texts.small_corpus(file, "body", None, 1, none)[0] != found
    assert len(texts.small_corpus(file, "body", 3, 0, none)[0]) == 3
    assert texts.small_corpus(["a", "b"], "text", None, 0, none) == (["a", "b"], [])
    with pytest.raises(InputError, match="a sample of 6"):
        texts.small_corpus(file, "body", 6, 0, none)
    with pytest.raises(InputError, match="both given"):
        texts.small_corpus(file, "body", None, 0, {**none, "texts": ["x"]})


def test_data_is_measured(tmp_path):
    tokenizer = word_level(sorted({w for s in SENTENCES for w in s.split()}))
    one = save(tmp_path / "one", "bert", tokenizer)
    found = headscope.compare(one, one, data=[{"body": s} for s in SENTENCES], text_column="body")
    assert found.texts == 3 and found.tokens == (sum(len(s.split()) for s in SENTENCES),) * 2


# ------------------------------------------------------------------ manners
def test_models_are_left_as_they_were_and_so_is_chance():
    models = [build("bert").train(), build("bert", seed=1)]
    before = [copy.deepcopy(m.state_dict()) for m in models]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    drawn = random.random(), np.random.random(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    headscope.compare(*models, ids=IDS)
    assert (random.random(), np.random.random(), torch.rand(1)) == drawn
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert models[0].training and not models[1].training


def test_one_model_is_in_memory_at_a_time(tmp_path, monkeypatch):
    from headscope.comparison import compare

    paths = [save(tmp_path / name, "bert") for name in ("one", "two")]
    own, models, alive = compare.loaded_model, [], []

    def watch(*given, **ways):
        alive.append([model() is not None for model in models])
        loaded = own(*given, **ways)
        models.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(compare, "loaded_model", watch)
    headscope.compare(*paths, ids=IDS)
    assert alive == [[], [False]] and [model() for model in models] == [None, None]


def test_batches_change_nothing():
    a, b = build("bert"), build("bert", seed=1)
    one, two = (headscope.compare(a, b, ids=IDS, max_rows=ALL, batch_size=n) for n in (1, 4))
    assert [h.distance for h in one.heads] == pytest.approx([h.distance for h in two.heads], abs=1e-6)
    assert [h.delta["entropy"] for h in one.heads] == pytest.approx([h.delta["entropy"] for h in two.heads], abs=1e-6)


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        ({"engine": "fast"}, "unknown engine"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"layer": 9}, "layer 9 does not exist"),
        ({"metrics": "nothing"}, "nothing"),
        ({"ids": None}, "no input"),
        ({"data": ["x"]}, "both given"),
    ],
)
def test_what_is_refused(ways, message):
    model = build("bert")
    with pytest.raises(InputError, match=message):
        headscope.compare(model, model, **{"ids": IDS, **ways})


def test_one_text_has_no_intervals_and_one_token_no_rows():
    a, b = build("gpt2"), build("gpt2", seed=1)
    found = headscope.compare(a, b, ids=[IDS[0]])
    assert all(h.spread is None and h.distance is not None for h in found.heads)
    alone = headscope.compare(a, b, ids=[[7]])
    assert alone.rows == 0 and all(h.distance is None for h in alone.heads)
    assert any("no row of both models" in w for w in alone.warnings)


def test_the_result_is_the_contracts_object():
    found = headscope.compare(build("bert"), build("bert", seed=1), ids=IDS).to_dict()
    json.dumps(found, allow_nan=False)
    assert found["schema"] == "headscope/compare@1" and all(isinstance(name, str) for name in found["models"])
    keys = {"stack", "layer", "head", "pattern_a", "pattern_b", "changed", "delta", "distance"}
    assert all(keys <= head.keys() for head in found["heads"])
    assert found["heads"][0]["delta"].keys() == {"sink", "prev_token", "self_attend", "entropy"}
    assert found["matching"][0].keys() >= {"a", "b", "similarity"} and found["matching"][0]["a"] == "L0H0"
