"""What pruning saves and costs, against independent computations: caches, files, transformers' own losses."""

from __future__ import annotations

import copy
import json
import math
import time

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

import headscope
from fixtures.families import FAMILIES, Family
from fixtures.tokenizers import build_tokenizer
from headscope.errors import InputError, ModelError
from headscope.importance.examples import Examples, read_examples
from headscope.models.inputs import prepare
from headscope.models.loading import load_model
from headscope.models.sites import find_sites
from headscope.pruning import latency
from headscope.pruning.cost import cost_of, layer_heads
from headscope.pruning.decoding import keeps_cache, step_after
from headscope.pruning.latency import measure_latency, parse_shapes, same_shapes
from headscope.pruning.quality import PARTS, measure_quality, parts_of
from headscope.pruning.turns import median_interval
from tests.prune_cases import varied_heads

TEXTS = ("the cat sat on the mat because it was tired", "a dog", "one house and another house and a cat")
# Before it caches them, this one repeats keys and values for each query head that shares them.
REPEATS = {"falcon_gqa": 2}
PLANS = {"albert": {0: [1]}, "falcon_gqa": {0: [0, 1]}}
WRITING = [name for name, family in FAMILIES.items() if family.modality in ("text", "seq2seq") and family.stacks]


def examples(*labels) -> Examples:
    return Examples(TEXTS, labels or (None,) * len(TEXTS))


def cached_bytes(model, inputs) -> int:
    """Bytes that one token takes in the cache that a forward pass fills; 0 where it fills none."""
    with torch.no_grad():
        given = getattr(model(**inputs, use_cache=True), "past_key_values", None)
    cache = getattr(given, "self_attention_cache", given)
    layers = [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "keys", None) is not None]
    tensors = [t for layer in layers for t in (layer.keys, layer.values)]
    return sum(t.numel() // t.shape[0] // t.shape[2] * t.element_size() for t in tensors)


# ------------------------------------------------------------------ sizes
@pytest.mark.parametrize("name", WRITING)
def test_the_cache_grows_by_what_is_said(name, family_model) -> None:
    model, inputs, family = family_model(name)
    expected = cached_bytes(model, inputs) if family.stacks.keys() != {"self"} or is_causal(family) else 0
    expected //= REPEATS.get(name, 1)
    assert cost_of(model).kv_cache == expected
    pruned = copy.deepcopy(model)
    headscope.prune_heads(pruned, PLANS.get(name) or varied_heads(family))
    after = cost_of(pruned).kv_cache
    assert after == (cached_bytes(pruned, inputs) // REPEATS.get(name, 1) if expected else 0)
    assert after < expected or not expected or name == "falcon_mqa"


def is_causal(family: Family) -> bool:
    return any(stack.causal for stack in family.stacks.values())


def test_what_attention_has_in_closed_form(family_model) -> None:
    bert = family_model("bert")[0]
    assert cost_of(bert).attention_params == 3 * 4 * (32 * 32 + 32)
    pruned = copy.deepcopy(bert)
    headscope.prune_heads(pruned, {1: [0, 2]})
    gone = 3 * (16 * 32 + 16) + 32 * 16
    for before, after in zip(sizes(bert), sizes(pruned), strict=True):
        assert before - after == gone
    llama, _, family = family_model("llama")
    shape = family.stacks["self"]
    widths = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    head_dim = llama.config.head_dim
    hidden = llama.config.hidden_size
    assert cost_of(llama).attention_params == len(shape.layers) * sum(w * head_dim * hidden for w in widths)


def sizes(model) -> tuple[int, int]:
    cost = cost_of(model)
    assert cost.params == sum(p.numel() for p in model.parameters())
    return cost.params, cost.attention_params


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama", "vit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_file(name, dtype, family_model, tmp_path) -> None:
    model = copy.deepcopy(family_model(name)[0]).to(dtype)
    model.save_pretrained(tmp_path)
    file = (tmp_path / "model.safetensors").read_bytes()
    header = int.from_bytes(file[:8], "little")
    assert cost_of(model).bytes == len(file) - 8 - header


def test_layers_tell_what_is_left(family_model) -> None:
    model, _, family = family_model("llama")
    size = family.stacks["self"].num_heads // family.stacks["self"].num_kv_heads
    pruned = copy.deepcopy(model)
    assert layer_heads(pruned) == ()
    headscope.prune_heads(pruned, {1: [0]}, ragged="mask")
    (layer,) = layer_heads(pruned)
    assert (layer.name, layer.gone, layer.zeroed, layer.left) == ("self.1", (0,), (0,), size * layer.kv_left)


# ------------------------------------------------------------------ latency
@given(st.lists(st.tuples(st.integers(1, 999), st.integers(1, 9999)), min_size=1, max_size=5), st.sampled_from("x×"))
def test_shapes_are_read_back(shapes, sign) -> None:
    assert parse_shapes(" , ".join(f"{b}{sign}{n}" for b, n in shapes)) == tuple(dict.fromkeys(shapes))


@pytest.mark.parametrize("text", ["", "8", "0x4", "4x0", "4x-1", "axb", "1x2x3", ";"])
def test_what_is_no_shape_is_refused(text) -> None:
    with pytest.raises(InputError, match="shapes of input"):
        parse_shapes(text)


@pytest.mark.parametrize("count", range(1, 60))
def test_the_interval_of_the_median_covers_95_percent(count) -> None:
    """Of the values 0 to n-1 the ends are ranks; the binomial tells how often the median lies outside."""
    low, high = median_interval(list(range(count))[::-1])
    if count < 6:
        assert (low, high) == (-math.inf, math.inf)
        return
    assert low + high == count - 1
    assert 2 * binom.cdf(low, count, 0.5) <= 0.05 < 2 * binom.cdf(low + 1, count, 0.5)


@pytest.fixture
def slowed(family_model, monkeypatch):
    """A GPT-2 and a copy whose forward passes take 60 and 20 ms more, and how they ran: (which, shape, tokens in the
    cache before, tokens seen by the mask)."""
    monkeypatch.setattr(latency, "_SECONDS", 0.05)
    ran: list[tuple[str, tuple[int, int], int, int]] = []

    def slow(model, name, seconds):
        forward = model.forward

        def call(*args, **kwargs):
            cache = kwargs.get("cache")
            before = 0 if cache is None else cache.get_seq_length()
            ran.append((name, tuple(kwargs["input_ids"].shape), before, kwargs["attention_mask"].shape[1]))
            time.sleep(seconds)
            return forward(*args, **kwargs)

        model.forward = call
        return model

    models = [copy.deepcopy(family_model("gpt2")[0]) for _ in range(2)]
    return slow(models[0], "before", 0.06), slow(models[1], "after", 0.02), ran


def test_both_run_in_turns_on_the_same_inputs(slowed) -> None:
    before, after, ran = slowed
    cells, conditions, notes = measure_latency(before, after, ((2, 5), (1, 500), (1, 9)))
    shapes = [("forward", 2, 5), ("forward", 1, 9), ("decode", 2, 5), ("decode", 1, 9)]
    assert [(c.kind, c.batch, c.length) for c in cells] == shapes
    assert notes == ("latency: 1×500 left out: the model takes 128 tokens",)
    assert (conditions.device, conditions.dtype, conditions.attention) == ("cpu", "float32", "sdpa")
    for cell in cells:
        if cell.kind == "decode":  # one token more, after so many each time
            wanted = ((cell.batch, 1), cell.length, cell.length + 1)
            own = [name for name, *how in ran if tuple(how) == wanted][4:]
        else:  # two of these fill the caches
            wanted = ((cell.batch, cell.length), 0, cell.length)
            own = [name for name, *how in ran if tuple(how) == wanted][4:-2]
        pairs = list(zip(own[::2], own[1::2], strict=True))
        assert len(pairs) == cell.rounds and {frozenset(p) for p in pairs} == {frozenset({"before", "after"})}
        assert sum(p[0] == "before" for p in pairs) * 2 == len(pairs)
        assert cell.before_ms - cell.after_ms > 20 and cell.ratio == cell.after_ms / cell.before_ms < 1
        assert not cell.in_noise
        assert cell.before_middle[0] <= cell.before_ms <= cell.before_middle[1]


DECODING = [*(name for name in WRITING if not FAMILIES[name].model_class.endswith("Model")), "whisper"]


@pytest.mark.parametrize("name", DECODING)
def test_a_step_with_a_cache_gives_the_next_logits(name, family_model) -> None:
    """What is timed is one token after the others, with what the model knows of them."""
    model, inputs, _ = family_model(name)
    assert keeps_cache(model)
    inputs = {k: v for k, v in inputs.items() if not k.endswith("attention_mask")}
    with torch.no_grad():
        key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        whole = inputs | {key: torch.cat([inputs[key], inputs[key][:, -1:]], dim=1)}
        wanted = model(**whole).logits[:, -1]
        step = step_after(model, inputs)
        for _ in range(2):  # the second runs on what the first one did, unless that was on a copy
            logits = model(**step.fresh()).logits
            assert logits.shape[1] == 1 and step.length == inputs[key].shape[1]
            assert float((logits[:, 0] - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_where_no_step_fits_none_is_timed(family_model, monkeypatch) -> None:
    monkeypatch.setattr(latency, "_SECONDS", 0.0)
    model = family_model("gpt2")[0]
    cells, _, notes = measure_latency(model, model, ((1, 128), (1, 127)))
    assert [(c.kind, c.length) for c in cells] == [("forward", 128), ("forward", 127), ("decode", 127)] and not notes
    encoder = family_model("bert")[0]
    assert [c.kind for c in measure_latency(encoder, encoder, ((1, 8),))[0]] == ["forward"]
    silent = copy.deepcopy(model)
    forward = silent.forward
    monkeypatch.setattr(silent, "forward", lambda **kwargs: forward(**kwargs | {"use_cache": False}))
    assert measure_latency(silent, silent, ((1, 8),))[2] == (
        "latency: steps with a cache are not timed: the model fills none",
    )


def test_a_model_is_as_fast_as_itself(family_model) -> None:
    model = family_model("bert")[0]
    cells, _, _ = measure_latency(model, model, ((1, 8),))
    assert 0.5 < cells[0].ratio < 2 and model.config._attn_implementation == "eager"
    assert same_shapes(model, copy.deepcopy(model))


@pytest.mark.parametrize("name", ["vit", "whisper", "clip", "t5", "roberta"])
def test_every_kind_of_input_has_a_latency(name, family_model, monkeypatch) -> None:
    monkeypatch.setattr(latency, "_SECONDS", 0.0)
    model, _, family = family_model(name)
    cells, _, _ = measure_latency(model, model, ((1, 4), (2, 4)))
    lengths = {None} if family.modality in ("vision", "audio") else {4}
    forward, decode = ([c for c in cells if c.kind == kind] for kind in ("forward", "decode"))
    assert [c.batch for c in forward] == [1, 2] and {c.length for c in forward} == lengths
    assert [c.batch for c in decode] == ([1, 2] if name in ("whisper", "t5") else [])
    assert {c.length for c in decode} <= {4 if name == "t5" else 6}


# ------------------------------------------------------------------ examples
def test_files_are_read(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\r\ntwo\u2028still two\n".encode())
    assert read_examples(tmp_path / "a.txt") == Examples(("one", "two\u2028still two"), (None, None))
    lines = [{"text": "one", "label": 1}, {"text": "two", "label": "good"}, {"text": "three"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    expected = Examples(("one", "two", "three"), (1, "good", None))
    assert read_examples(tmp_path / "a.jsonl") == expected == read_examples(lines)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", "x", "suffix"),
        ("a.csv", "x", "no column 'text'"),
        ("a.txt", "\n \n", "no text"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.jsonl", '{"text": "a"}\n{"text"', "a.jsonl:2 is not JSON"),
        ("a.jsonl", '{"label": 1}', "a.jsonl:1 has no text"),
        ("a.jsonl", '{"text": " "}', "a.jsonl:1 has no text"),
        ("a.jsonl", '{"text": "a", "label": 0.5}', "label 0.5"),
        ("a.jsonl", '{"text": "a", "label": true}', "label True"),
        ("none.txt", None, "cannot read"),
    ],
)
def test_bad_files_name_the_line(name, content, message, tmp_path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        read_examples(tmp_path / name)


# ------------------------------------------------------------------ quality
def pruned_twin(loaded, heads):
    twin = copy.deepcopy(loaded.model)
    headscope.prune_heads(twin, heads)
    return twin


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom"])
def test_perplexity_is_that_of_transformers_own_loss(name, saved) -> None:
    loaded = load_model(str(saved(name)), own_class=True)
    after = pruned_twin(loaded, {0: range(loaded.model.config.num_attention_heads // 2)})
    found, _ = measure_quality(loaded, after, examples())
    for model, measured in ((loaded.model, found.before), (after, found.after)):
        losses, count = 0.0, 0
        for text in TEXTS:
            ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                losses += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
        assert measured == pytest.approx(math.exp(losses / count), rel=1e-5)
        assert found.tokens == count
    assert found.metric == "perplexity" and found.better == "lower" and found.before != found.after


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory):
    return _bert(tmp_path_factory.mktemp("masked"), "BertForMaskedLM")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    names = {"id2label": {0: "bad", 1: "fair", 2: "good"}, "label2id": {"bad": 0, "fair": 1, "good": 2}}
    return _bert(tmp_path_factory.mktemp("classifier"), "BertForSequenceClassification", **names)


def _bert(folder, class_name, **changes):
    config = transformers.BertConfig(**FAMILIES["bert"].config, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    build_tokenizer("wordpiece").save_pretrained(folder)
    loaded = load_model(str(folder), own_class=True)
    assert type(loaded.model).__name__ == class_name
    return loaded


def test_a_masked_model_predicts_each_token_once(masked_lm) -> None:
    after = pruned_twin(masked_lm, {0: [1], 2: [0, 3]})
    found, _ = measure_quality(masked_lm, after, examples(), seed=5)
    prepared = prepare(masked_lm, texts=TEXTS)
    for model, measured in ((masked_lm.model, found.before), (after, found.after)):
        losses = []
        for batch in prepared.batches:
            parts = parts_of(batch.axes["text"], batch.order, 5)
            for row, length in enumerate(batch.axes["text"].lengths.tolist()):
                ids = batch.inputs["input_ids"][row, :length]
                for part in range(PARTS):
                    places = [i for i in range(length) if parts[row, i] == part]
                    changed = ids.clone()
                    changed[places] = masked_lm.tokenizer.mask_token_id
                    with torch.no_grad():
                        logits = model(input_ids=changed[None]).logits[0].double().numpy()
                    for i in places:
                        shifted = logits[i] - logits[i].max()
                        losses.append(np.log(np.exp(shifted).sum()) - shifted[ids[i]])
        assert len(losses) == found.tokens == sum(len(masked_lm.tokenizer.tokenize(t)) for t in TEXTS)
        assert measured == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.metric == "pseudo_log_likelihood_loss" and found.before != found.after


def test_masks_are_fixed_by_the_seed_not_by_batches(masked_lm) -> None:
    def parts(seed: int, size: int | None) -> dict[int, list[int]]:
        rows = {}
        for batch in prepare(masked_lm, texts=TEXTS, batch_size=size).batches:
            axis = batch.axes["text"]
            for i, number in enumerate(batch.order):
                rows[number] = parts_of(axis, batch.order, seed)[i, : axis.lengths[i]].tolist()
        return rows

    assert parts(1, 1) == parts(1, 3) != parts(2, 3)
    for row in parts(1, 3).values():
        assert row[0] == row[-1] == -1  # [CLS] and [SEP]
        counts = np.bincount(row[1:-1], minlength=PARTS)
        assert counts.max() - counts.min() <= 1


def test_accuracy_counts_what_is_chosen(classifier) -> None:
    after = pruned_twin(classifier, {0: [0, 1, 2], 1: [1, 2, 3]})
    names = ["bad", "fair", "good"]

    def chosen(model) -> list[int]:
        encoded = [classifier.tokenizer(text, return_tensors="pt") for text in TEXTS]
        with torch.no_grad():
            return [int(model(**e).logits.argmax()) for e in encoded]

    before = chosen(classifier.model)
    found, _ = measure_quality(classifier, after, examples(*(names[i] for i in before)))
    assert (found.metric, found.before) == ("accuracy", 1.0)
    assert found.after == pytest.approx(np.mean([a == b for a, b in zip(before, chosen(after), strict=True)]))
    found, _ = measure_quality(classifier, classifier.model, examples(*((i + 1) % 3 for i in before)))
    assert found.before == found.after == 0


@pytest.mark.parametrize(
    ("labels", "message"), [((0, None, 1), "text 1 .*has no label"), ((0, 3, 1), "label 3"), ((0, 1, "x"), "'x'")]
)
def test_labels_must_be_there_and_known(labels, message, classifier) -> None:
    with pytest.raises(InputError, match=message):
        measure_quality(classifier, classifier.model, examples(*labels))


def test_cosine_of_the_output_of_an_encoder(saved) -> None:
    loaded = load_model(str(saved("bert")), own_class=True)
    after = pruned_twin(loaded, {0: [0, 1], 1: [2]})
    found, _ = measure_quality(loaded, after, examples())
    cosines = []
    for text in TEXTS:
        encoded = loaded.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            a, b = (m(**encoded).last_hidden_state[0].double().numpy().mean(0) for m in (loaded.model, after))
        cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert found.metric == "cosine" and found.before == 1
    assert found.after == pytest.approx(np.mean(cosines), rel=1e-6) and found.after < 1
    same, _ = measure_quality(loaded, loaded.model, examples())
    assert same.after == pytest.approx(1)


def test_an_encoder_decoder_reads_the_text_on_both_sides(saved) -> None:
    loaded = load_model(str(saved("t5")), own_class=True)
    found, _ = measure_quality(loaded, pruned_twin(loaded, "decoder.0:1;cross.1:2"), examples())
    assert found.metric == "cosine" and 0 < found.after < 1


def test_no_mask_token_is_said(masked_lm) -> None:
    loaded = copy.copy(masked_lm)
    loaded.tokenizer = copy.deepcopy(masked_lm.tokenizer)
    loaded.tokenizer.mask_token = None
    with pytest.raises(ModelError, match="mask token"):
        measure_quality(loaded, loaded.model, examples())


def test_sites_that_cache_are_the_decoders_own(family_model) -> None:
    from headscope.pruning.cost import has_cache

    for name, stacks in (("t5", {"decoder"}), ("bert", set()), ("bloom", {"self"}), ("clip", set())):
        assert {s.stack for s in find_sites(family_model(name)[0]) if has_cache(s)} == stacks
