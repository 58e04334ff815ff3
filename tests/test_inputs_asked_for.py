"""Texts that are continued, put into a chat template, given in pairs or as words, and images with captions."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    ByT5Tokenizer,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import headscope
from fixtures.tokenizers import VOCAB_SIZES, build_tokenizer
from headscope.cli.main import main
from headscope.errors import InputError, ModelError
from headscope.models.batches import TokenSequence
from headscope.models.inputs import Prepared, prepare
from headscope.models.loading import LoadedModel, load_model, wrap_model
from headscope.models.packaged import packaged_directory
from headscope.models.quiet import quiet
from headscope.models.text_form import TextForm
from headscope.models.text_inputs import shorten, text_sequences
from headscope.results import Analysis
from tests.tiny_checkpoints import byte_bpe, save, tiny_config, tiny_model, unigram, wordpiece

CHAT = (
    "{{ bos_token or '' }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["the cat sat on the mat", "a dog saw it", "the cat sat on the mat", "it was"]
SECOND = ["because it was tired", "the mat", "a dog, a house", "the cat sat on the mat because it was tired"]


def writer(family: str, **changes: Any) -> PreTrainedModel:
    """A causal language model with weights large enough that it does not repeat one token."""
    torch.manual_seed(1)
    config = tiny_config(family, initializer_range=0.4, **changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def chatting(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """With marks of turns that are special, but have no role, as in many chat models."""
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="module")
def gpt2() -> LoadedModel:
    return wrap_model(writer("gpt2"), chatting(byte_bpe()))


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    size = VOCAB_SIZES["unigram_bos"] + 2
    return wrap_model(
        writer("llama", vocab_size=size, max_position_embeddings=60), chatting(build_tokenizer("unigram_bos"))
    )


@pytest.fixture(scope="module")
def bert() -> LoadedModel:
    return wrap_model(tiny_model("bert"), wordpiece())


def by_text(prepared: Prepared) -> list[tuple[list[int], list[int], tuple[str, ...], tuple[int, ...], list[bool]]]:
    """Ids, segments, labels, words and special marks of each text, in the user's order; padding left out."""
    found: dict[int, Any] = {}
    for batch in prepared.batches:
        axis = batch.axes["text"]
        for row, text in enumerate(batch.order):
            n = int(axis.lengths[row])
            ids, types = batch.inputs["input_ids"][row], batch.inputs.get("token_type_ids")
            assert batch.inputs["attention_mask"][row].tolist() == [1] * n + [0] * (len(ids) - n)
            segments = [] if types is None else types[row, :n].tolist()
            special = axis.special[row, :n].tolist()
            found[text] = (ids[:n].tolist(), segments, axis.labels[row], axis.words[row], special)
    return [found[i] for i in range(len(found))]


def numbers(result: Analysis) -> list[Any]:
    return [record.metrics for record in result.heads]


def greedily(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """Token by token, without cache or `generate`."""
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


def command(arguments: list[str]) -> int:
    """The exit code of `headscope analyze`."""
    with pytest.raises(SystemExit) as caught:
        main(["analyze", *arguments])
    return int(caught.value.code or 0)


# ------------------------------------------------------------------ generate
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prompt_and_continuation_are_one_forward_pass(family: str, request: pytest.FixtureRequest) -> None:
    loaded: LoadedModel = request.getfixturevalue(family)
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    whole = [greedily(loaded.model, ids, 5) for ids in prompts]
    assert len({n for ids, p in zip(whole, prompts, strict=True) for n in ids[len(p) :]}) > 3
    given = {"tokenizer": loaded.tokenizer, "metrics": "all"}
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    settings_before = loaded.model.generation_config.to_dict()  # type: ignore[union-attr]
    for words in (False, True):
        written = headscope.analyze(loaded.model, TEXTS, generate=5, words=words, **given)
        stitched = headscope.analyze(loaded.model, ids=whole, words=words, maps=True, **given)
        assert numbers(written) == numbers(stitched)
        assert written.inputs.first_tokens == stitched.inputs.first_tokens
    assert written.inputs.tokens == sum(map(len, whole))
    (note,) = [warning for warning in written.warnings if "continued" in warning]
    assert repr(loaded.tokenizer.decode(whole[0][len(prompts[0]) :])) in note and "5 tokens" in note
    # The first text's rows are those of transformers' own forward pass over all of it.
    alone = headscope.analyze(loaded.model, TEXTS[0], generate=5, maps=True, tokenizer=loaded.tokenizer)
    with torch.no_grad():
        output = loaded.model(input_ids=torch.tensor([whole[0]]), output_attentions=True)
    assert alone.maps is not None
    for layer in alone.maps:
        np.testing.assert_allclose(layer.weights, output.attentions[layer.layer][0], atol=5e-6)
    from_ids = headscope.analyze(loaded.model, ids=prompts, generate=5, **given)
    assert numbers(from_ids) == numbers(headscope.analyze(loaded.model, ids=whole, **given))
    # What the user gave is as it was.
    assert all(torch.equal(before[name], value) for name, value in loaded.model.state_dict().items())
    assert loaded.model.generation_config.to_dict() == settings_before  # type: ignore[union-attr]


def test_batches_do_not_change_what_is_written(llama: LoadedModel) -> None:
    together = by_text(prepare(llama, texts=TEXTS, form=TextForm(generate=4)))
    small = by_text(prepare(llama, texts=TEXTS, form=TextForm(generate=4), batch_size=1))
    alone = [by_text(prepare(llama, texts=[text], form=TextForm(generate=4)))[0] for text in TEXTS]
    assert together == small == alone


def test_the_end_token_ends_the_continuation(gpt2: LoadedModel) -> None:
    assert gpt2.tokenizer is not None
    prompts = [gpt2.tokenizer(text)["input_ids"] for text in (TEXTS[0], "the mat sat on the cat")]
    whole = [greedily(gpt2.model, ids, 6) for ids in prompts]
    n = len(prompts[0])
    assert len(prompts[1]) == n  # one batch
    end = whole[0][n + 2]
    first = whole[0][n:].index(end) + 1
    settings: Any = gpt2.model.generation_config
    settings.eos_token_id = [end, 399]
    try:
        got = by_text(prepare(gpt2, ids=prompts, form=TextForm(generate=6)))
    finally:
        settings.eos_token_id = None
    assert got[0][0] == whole[0][: n + first]
    stop = whole[1][n:].index(end) + 1 if end in whole[1][n:] else 6
    assert got[1][0] == whole[1][: n + stop]


def test_what_closes_a_text_is_left_out_where_it_goes_on() -> None:
    loaded = wrap_model(writer("llama"), unigram())
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer("the cat sat")["input_ids"]
    assert ids[-1] == loaded.tokenizer.eos_token_id
    assert by_text(prepare(loaded, texts=["the cat sat"], form=TextForm(generate=2)))[0][0] == greedily(
        loaded.model, ids[:-1], 2
    )


def test_the_prompt_is_cut_so_that_the_continuation_fits(gpt2: LoadedModel) -> None:
    text = " ".join(["the cat sat on the mat"] * 9)
    assert gpt2.tokenizer is not None
    ids = gpt2.tokenizer(text)["input_ids"]
    assert len(ids) > 40
    for most, kept in ((None, 40 - 7), (10, 10), (36, 33)):
        prepared = prepare(gpt2, texts=[text, "a dog"], max_length=most, form=TextForm(generate=7))
        assert by_text(prepared)[0][0] == greedily(gpt2.model, ids[:kept], 7)
        assert prepared.truncated == 1
        assert any(f"text 0 cut to {kept} tokens" in warning for warning in prepared.warnings)
    with pytest.raises(InputError, match="leave no room"):
        prepare(gpt2, texts=[text], form=TextForm(generate=40))
    with pytest.raises(InputError, match="the limit is 33"):
        prepare(gpt2, texts=[text], strict_length=True, form=TextForm(generate=7))


def test_an_encoder_decoder_writes_at_most_so_much() -> None:
    model = tiny_model("t5", generating=True, decoder_start_token_id=0, initializer_factor=3.0)
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    loaded = wrap_model(model, unigram())
    lengths = {}
    for most in (None, 3, 30):
        prepared = prepare(loaded, texts=TEXTS[:2], form=TextForm(generate=most))
        (batch,) = prepared.batches
        lengths[most] = batch.axes["decoder"].lengths.tolist()
        expected = model.generate(  # type: ignore[operator]
            **{k: v for k, v in batch.inputs.items() if "decoder" not in k},
            max_new_tokens=most or 20, min_new_tokens=1, do_sample=False,
        )  # fmt: skip
        ends = [next((i for i, n in enumerate(row) if i and n in (0, 1)), len(row)) for row in expected.tolist()]
        assert lengths[most] == ends
        assert loaded.tokenizer is not None  # the encoder's texts do not grow
        assert by_text(prepared)[0][0] == loaded.tokenizer(TEXTS[0])["input_ids"]
    assert max(lengths[3]) <= 4


def test_who_cannot_write_says_so(bert: LoadedModel, tmp_path: Path) -> None:
    for loaded in (bert, wrap_model(tiny_model("gpt2"), byte_bpe())):
        with pytest.raises(InputError, match="cannot continue a text"):
            headscope.analyze(loaded.model, TEXTS[0], tokenizer=loaded.tokenizer, generate=3)
    with pytest.raises(InputError, match="cannot continue a text"):
        headscope.analyze(packaged_directory(), "Hello.", generate=3)
    # From checkpoints: encoders do not become writers, nor do decoders without a trained head.
    for family, tokenizer in (("bert", wordpiece()), ("llama", unigram())):
        directory = save(tmp_path / family, family, tokenizer)
        with pytest.raises(InputError, match="cannot continue a text"):
            headscope.analyze(directory, "the cat", generate=3)
    # GPT-2's head is its embeddings, which a checkpoint of the bare model has.
    bare = save(tmp_path / "gpt2", "gpt2", byte_bpe())
    written = headscope.analyze(bare, "the cat", generate=3)
    assert written.inputs.tokens > len(byte_bpe()("the cat")["input_ids"])
    decoder = save(tmp_path / "t5", "t5", unigram(), decoder_start_token_id=0)
    assert headscope.analyze(decoder, "the cat", generate=3).heads


# ------------------------------------------------------------------ chat
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_chat_template_is_the_tokenizers_own(family: str, request: pytest.FixtureRequest) -> None:
    loaded: LoadedModel = request.getfixturevalue(family)
    tokenizer: Any = loaded.tokenizer
    got = by_text(prepare(loaded, texts=TEXTS, form=TextForm(chat=True)))
    for text, (ids, _, labels, _, special) in zip(TEXTS, got, strict=True):
        message = [{"role": "user", "content": text}]
        expected = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ids == expected
        assert ids.count(tokenizer.bos_token_id) == 1 and special[0]
        marks = [i for i, label in enumerate(labels) if label in ("<|im_start|>", "<|im_end|>")]
        assert len(marks) == 3 and [i for i, on in enumerate(special) if on] == [0, *marks]
    ids = [row[0] for row in got]
    given = {"tokenizer": tokenizer, "metrics": "all", "words": True}
    assert numbers(headscope.analyze(loaded.model, TEXTS, chat=True, **given)) == numbers(
        headscope.analyze(loaded.model, ids=ids, **given)
    )


def test_a_chat_is_continued(llama: LoadedModel) -> None:
    prompt = by_text(prepare(llama, texts=TEXTS[:1], form=TextForm(chat=True)))[0][0]
    got = by_text(prepare(llama, texts=TEXTS[:1], form=TextForm(chat=True, generate=3)))[0][0]
    assert got == greedily(llama.model, prompt, 3)


def test_a_long_message_is_cut_and_not_its_template(llama: LoadedModel) -> None:
    long = " ".join(["the cat sat on the mat"] * 20)
    cat, dog, uncut = (
        by_text(prepare(llama, texts=[t], max_length=999, form=TextForm(chat=True)))[0][0] for t in ("cat", "dog", long)
    )
    start = next(i for i, (a, b) in enumerate(zip(cat, dog, strict=False)) if a != b)
    end = next(i for i, (a, b) in enumerate(zip(cat[::-1], dog[::-1], strict=False)) if a != b)
    prepared = prepare(llama, texts=[long, "cat"], max_length=50, form=TextForm(chat=True))
    cut = by_text(prepared)[0][0]
    assert len(cut) == 50 and prepared.truncated == 1 and end > 3
    assert cut == [*uncut[: 50 - end], *uncut[-end:]] and cut[:start] == cat[:start] and cut[-end:] == cat[-end:]


def test_a_tokenizer_without_a_template(bert: LoadedModel) -> None:
    with pytest.raises(InputError, match="no chat template"):
        prepare(bert, texts=TEXTS, form=TextForm(chat=True))
    broken = byte_bpe()
    broken.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(ModelError, match="no users here"):
        prepare(wrap_model(tiny_model("gpt2"), broken), texts=TEXTS, form=TextForm(chat=True))


# ------------------------------------------------------------------ pairs
@pytest.mark.parametrize("kind", ["wordpiece", "roberta", "unigram_eos"])
def test_pairs_are_encoded_as_transformers_does(kind: str) -> None:
    family = {"wordpiece": "bert", "roberta": "roberta", "unigram_eos": "bert"}[kind]
    tokenizer: Any = wordpiece() if kind == "wordpiece" else build_tokenizer(kind)
    loaded = wrap_model(tiny_model(family, vocab_size=600, max_position_embeddings=60), tokenizer)
    for second in (SECOND, ["the mat"]):
        got = by_text(prepare(loaded, texts=TEXTS, form=TextForm(pairs=tuple(second))))
        expected = tokenizer(TEXTS, second * (4 // len(second)), return_special_tokens_mask=True)
        assert [row[0] for row in got] == expected["input_ids"]
        assert [row[1] for row in got] == expected.get("token_type_ids", [[]] * 4)
        assert [row[4] for row in got] == [list(map(bool, mask)) for mask in expected["special_tokens_mask"]]
    if kind == "wordpiece":
        assert {n for row in got for n in row[1]} == {0, 1}


@given(first=st.integers(1, 12), second=st.integers(1, 12), limit=st.integers(5, 26), left=st.booleans())
@settings(max_examples=60, deadline=None)
def test_pairs_are_cut_as_transformers_does(first: int, second: int, limit: int, left: bool) -> None:
    tokenizer: Any = PAIRED.tokenizer
    tokenizer.truncation_side = "left" if left else "right"
    words = ["the", "cat", "sat", "on", "a", "mat", "it", "was", "tired", "dog", "because", "house"]
    texts = " ".join(words[:first]), " ".join(words[::-1][:second])
    expected = tokenizer(*texts, truncation="longest_first", max_length=limit)
    (sequence,), _ = text_sequences(PAIRED, [texts[0]], form=TextForm(pairs=(texts[1],)))
    cut = shorten(sequence, limit, from_left=left)
    assert list(cut.ids) == expected["input_ids"]
    assert list(cut.type_ids or ()) == expected["token_type_ids"]
    assert {0, 1} <= set(cut.parts or ())


PAIRED = wrap_model(tiny_model("bert"), wordpiece())


def test_cut_pairs_are_counted_and_measured(bert: LoadedModel) -> None:
    prepared = prepare(bert, texts=TEXTS, max_length=9, form=TextForm(pairs=tuple(SECOND)))
    tokenizer: Any = wordpiece()
    whole = tokenizer(TEXTS, SECOND)["input_ids"]
    assert prepared.truncated == sum(len(ids) > 9 for ids in whole) == 3
    assert any("3 of 4 texts cut to 9 tokens" in warning for warning in prepared.warnings)
    with pytest.raises(InputError, match="no room"):
        prepare(bert, texts=TEXTS, max_length=4, form=TextForm(pairs=tuple(SECOND)))
    # In a batch with padding the numbers are those of transformers on each pair alone.
    result = headscope.analyze(bert.model, TEXTS, pairs=SECOND, tokenizer=bert.tokenizer, maps=True)
    one = tokenizer(TEXTS[0], SECOND[0], return_tensors="pt")
    with torch.no_grad():
        output = bert.model(**one, output_attentions=True)
    assert result.maps is not None
    for layer in result.maps:
        np.testing.assert_allclose(layer.weights, output.attentions[layer.layer][0], atol=5e-6)
    alone = [headscope.analyze(bert.model, a, pairs=b, tokenizer=tokenizer) for a, b in zip(TEXTS, SECOND, strict=True)]
    for i, record in enumerate(result.heads):
        mean = np.mean([one.heads[i].metrics["entropy"] for one in alone])
        assert record.metrics["entropy"] == pytest.approx(float(mean), abs=1e-6)


def test_pairs_that_are_none(gpt2: LoadedModel, bert: LoadedModel) -> None:
    with pytest.raises(InputError, match="puts nothing between two texts"):
        prepare(gpt2, texts=TEXTS, form=TextForm(pairs=("the mat",)))
    with pytest.raises(InputError, match="does not find two texts"):
        prepare(bert, texts=["the cat"], form=TextForm(pairs=("\u200b",)))
    for pairs in (["a", "b"], [], "", ["a", " ", "b", "c"]):
        with pytest.raises(InputError, match="second text"):
            headscope.analyze("nowhere", TEXTS, pairs=pairs)


# ------------------------------------------------------------------ words
def test_given_words_are_the_words(bert: LoadedModel) -> None:
    tokenizer: Any = bert.tokenizer
    texts = ["the cat's un-believable mats .", "don't  sit\ton\nit"]
    got = by_text(prepare(bert, texts=texts, form=TextForm(pre_split=True)))
    expected = tokenizer([text.split() for text in texts], is_split_into_words=True)
    for i, (ids, _, _, words, _) in enumerate(got):
        assert ids == expected["input_ids"][i]
        same = [a == b and a is not None for a, b in pairwise(expected.word_ids(i))]
        assert [a == b for a, b in pairwise(words)] == same
        assert len(set(words)) == len(texts[i].split()) + 2
    merged = headscope.analyze(bert.model, texts, tokenizer=tokenizer, pre_split=True, words=True)
    plain = headscope.analyze(bert.model, texts, tokenizer=tokenizer, words=True)
    assert numbers(merged) != numbers(plain)


@pytest.mark.parametrize("kind", ["byte_bpe", "roberta", "unigram_bos", "unigram_eos", "characters", "added_space"])
def test_given_words_keep_their_spaces(kind: str) -> None:
    """A model reads the words as in a text, whichever way its tokenizer writes spaces."""
    tokenizer: Any = build_tokenizer(kind) if kind in VOCAB_SIZES else ByT5Tokenizer()
    if kind == "added_space":
        tokenizer = build_tokenizer("byte_bpe")
        tokenizer.backend_tokenizer.pre_tokenizer.add_prefix_space = True
    family = "llama" if kind not in ("roberta", "unigram_eos") else "bert"
    loaded = wrap_model(tiny_model(family, vocab_size=600, max_position_embeddings=90), tokenizer)
    text = "the unlikely cat sat on don't , quickest"
    (ids, _, _, words, special), other = by_text(prepare(loaded, texts=[text, "a"], form=TextForm(pre_split=True)))
    assert ids == tokenizer(text)["input_ids"]
    assert other[0] == tokenizer("a")["input_ids"]
    pieces: dict[int, list[int]] = {}
    for number, word, on in zip(ids, words, special, strict=True):
        pieces.setdefault(word, []).append(-1 if on else number)
    read = [tokenizer.decode(one).strip() for one in pieces.values() if -1 not in one]
    assert read == text.split()


def test_pairs_of_given_words(bert: LoadedModel) -> None:
    tokenizer: Any = bert.tokenizer
    form = TextForm(pairs=("on un-believable mats",), pre_split=True)
    (ids, types, _, words, _), _ = by_text(prepare(bert, texts=["the cat's", "a"], form=form))
    expected = tokenizer(["the", "cat's"], form.pairs[0].split(), is_split_into_words=True)  # type: ignore[index]
    assert (ids, types) == (expected["input_ids"], expected["token_type_ids"])
    assert len(set(words)) == 3 + 2 + 3


# ------------------------------------------------------------------ images
@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path, Path]:
    root, tokenizer = tmp_path_factory.mktemp("llava"), byte_bpe()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    number = tokenizer.convert_tokens_to_ids("<image>")
    vision, text = tiny_config("clip").vision_config.to_dict(), writer("llama").config.to_dict()  # type: ignore[attr-defined]
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=number, image_token_id=number)
    template = (
        "{{ '<|endoftext|>' }}{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
        "<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}!"
    )
    with quiet():
        pictures = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        LlavaProcessor(
            image_processor=pictures, tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default",
            num_additional_image_tokens=1, image_token="<image>", chat_template=template,
        ).save_pretrained(root)  # fmt: skip
        torch.manual_seed(2)
        LlavaForConditionalGeneration(config).save_pretrained(root)
    picture = root / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(picture)
    return load_model(str(root), writes=True), root, picture


def test_an_image_with_a_caption(
    llava: tuple[LoadedModel, Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    loaded, root, picture = llava
    processor: Any = loaded.processor
    arguments = ["the cat", "--image", str(picture), "--model", str(root), "--stack", "text"]
    assert command([*arguments, "--weights", str(tmp_path / "w.npz"), "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    inputs = processor(text="<image>\nthe cat", images=Image.open(picture), return_tensors="pt")
    with torch.no_grad():
        output = loaded.model(**inputs, output_attentions=True)
    assert result["inputs"]["tokens"] == inputs["input_ids"].shape[1]
    written = np.load(tmp_path / "w.npz", allow_pickle=False)
    np.testing.assert_allclose(written["text.0"], output.attentions[0][0], atol=5e-6)


def test_a_chat_about_an_image_is_continued(llava: tuple[LoadedModel, Path, Path]) -> None:
    loaded, _, picture = llava
    processor: Any = loaded.processor
    form = TextForm(chat=True, generate=3)
    prepared = prepare(loaded, texts=["the cat"], images=[str(picture)], form=form)
    (batch,) = prepared.batches
    inputs = processor(text="<|endoftext|><image>the cat!", images=Image.open(picture), return_tensors="pt")
    n = inputs["input_ids"].shape[1]
    ids, got = inputs["input_ids"], batch.inputs["input_ids"]
    for _ in range(3):
        with torch.no_grad():
            logits = loaded.model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(got, ids[:, : got.shape[1]]) and got.shape[1] > n
    assert batch.inputs["attention_mask"].tolist() == [[1] * got.shape[1]]
    assert "continued" in prepared.warnings[0]


# ------------------------------------------------------------------ what goes together
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ids": [1], "chat": True}, "chat template needs texts"),
        ({"ids": [1], "pairs": "b"}, "needs texts"),
        ({"ids": [1], "pre_split": True}, "needs texts"),
        ({"texts": "a", "images": ["x.png"], "pairs": "b"}, "exclude"),
        ({"texts": "a", "audio": ["x.wav"], "pre_split": True}, "exclude"),
        ({"texts": "a", "chat": True, "pairs": "b"}, "exclude"),
        ({"texts": "a", "chat": True, "pre_split": True}, "exclude"),
        ({"texts": "a", "generate": 2, "decoder_texts": "b"}, "exclude"),
        ({"inputs": {"input_ids": torch.ones(1, 2)}, "generate": 2}, "exclude"),
        ({"texts": "a", "generate": 0}, "needs 1 or more"),
        ({"texts": "a", "generate": True}, "needs 1 or more"),
        ({"texts": "a", "generate": 1.5}, "needs 1 or more"),
    ],
)
def test_what_does_not_go_together_is_refused_before_loading(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        headscope.analyze("no/such-model", **given)


def test_plain_sequences_are_cut_as_ever() -> None:
    plain = TokenSequence((2, 7, 8, 9, 3), (True, False, False, False, True), ("",) * 5, tuple(range(5)))
    assert shorten(plain, 4).ids == (2, 7, 8, 3)
    assert shorten(plain, 4, from_left=True).ids == (2, 8, 9, 3)


# ------------------------------------------------------------------ command line
@pytest.fixture(scope="module")
def saved_llama(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("saved")
    with quiet():
        llama.model.save_pretrained(root)
        llama.tokenizer.save_pretrained(root)  # type: ignore[union-attr]
    return str(root)


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The JSON result and the lines on standard error."""
    assert command([*arguments, "--format", "json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_the_options_do_what_the_arguments_do(
    saved_llama: str, llama: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    result, said = run([TEXTS[0], TEXTS[1], "--chat", "--generate", "4", "--model", saved_llama], capsys)
    expected = headscope.analyze(llama.model, TEXTS[:2], tokenizer=llama.tokenizer, chat=True, generate=4)
    assert [h["metrics"] for h in result["heads"]] == [h["metrics"] for h in expected.to_dict()["heads"]]
    assert "the model continued the text greedily by 4 tokens" in said
    pair, _ = run(["How old is the river?", "--pair", "Nobody knows.", "--layer", "1"], capsys)
    assert pair["inputs"]["tokens"] == 12
    split, _ = run(["don't stop", "--pre-split", "--words", "--layer", "1"], capsys)
    in_python = headscope.analyze(packaged_directory(), "don't stop", pre_split=True, words=True, layer=1)
    assert [h["metrics"] for h in split["heads"]] == [h["metrics"] for h in in_python.to_dict()["heads"]]


@pytest.mark.parametrize("option", [["--generate", "3"], ["--chat"], ["--pair", "b"], ["--pre-split"]])
def test_corpora_are_read_as_they_are(option: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a cat\n", encoding="utf-8")
    assert command(["--data", str(tmp_path / "texts.txt"), *option]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert error == [f"error: --data and {option[0]} exclude each other"]


def test_encoders_say_in_one_line_that_they_do_not_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["Hello.", "--generate", "3"]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "cannot continue a text" in said and "Traceback" not in said
