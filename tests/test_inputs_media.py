"""Images, sounds, texts with images, and what decoders read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from transformers import CLIPConfig, CLIPTokenizer, LlavaConfig, LlavaForConditionalGeneration

from headscope.errors import InputError, ModelError
from headscope.models.inputs import prepare
from headscope.models.loading import LoadedModel, load_model, wrap_model
from headscope.models.media_inputs import load_sound
from headscope.models.quiet import quiet
from headscope.models.tokens import _printable_bytes
from tests.tiny_checkpoints import byte_bpe, save, tiny_config, tiny_model, unigram, wordpiece

IMAGE: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("media")
    Image.fromarray(IMAGE).save(root / "a.png")
    soundfile.write(root / "a.wav", np.sin(np.arange(4410) / 9)[:, None] * [0.1, 0.3], 44_100)
    (root / "broken.png").write_bytes(b"no picture")
    (root / "broken.wav").write_bytes(b"no sound")
    return root


def with_processor(directory: Path, family: str, processor: object, tokenizer: object = None) -> LoadedModel:
    with quiet():
        processor.save_pretrained(directory)  # type: ignore[attr-defined]  # any of several kinds
    return load_model(str(save(directory, family, tokenizer)), need_generation=True)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    size = {"height": 16, "width": 16}
    return with_processor(tmp_path_factory.mktemp("vit"), "vit", transformers.ViTImageProcessor(size=size))


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    return with_processor(tmp_path_factory.mktemp("whisper"), "whisper", extractor, byte_bpe())


def image_processor() -> transformers.CLIPImageProcessor:
    with quiet():
        return transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    root = tmp_path_factory.mktemp("clip")
    names = ["<|startoftext|>", "<|endoftext|>", *_printable_bytes(), *(c + "</w>" for c in _printable_bytes())]
    tokenizer = CLIPTokenizer(vocab={n: i for i, n in enumerate(names)}, merges=[])
    tiny = tiny_config("clip")
    assert isinstance(tiny, CLIPConfig)
    text = tiny.text_config.to_dict() | {"vocab_size": len(names), "bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(text_config=text, vision_config=tiny.vision_config.to_dict(), projection_dim=16)
    with quiet():
        transformers.CLIPProcessor(image_processor=image_processor(), tokenizer=tokenizer).save_pretrained(root)
        transformers.CLIPModel(config).save_pretrained(root)
    return load_model(str(root))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    root, tokenizer = tmp_path_factory.mktemp("llava"), byte_bpe()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    number = tokenizer.convert_tokens_to_ids("<image>")
    vision = tiny_config("clip").vision_config.to_dict()
    text = tiny_config("llama").to_dict()
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=number, image_token_id=number)
    with quiet():
        transformers.LlavaProcessor(
            image_processor=image_processor(),
            tokenizer=tokenizer,
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            image_token="<image>",
        ).save_pretrained(root)
        LlavaForConditionalGeneration(config).save_pretrained(root)
    return load_model(str(root))


def test_images_come_from_paths_and_from_memory(vit: LoadedModel, files: Path) -> None:
    prepared = prepare(vit, images=[str(files / "a.png"), IMAGE, Image.fromarray(IMAGE)])
    assert prepared.texts == 3
    assert prepared.tokens == 0
    assert all(batch.axes == {} for batch in prepared.batches)
    values = [batch.inputs["pixel_values"] for batch in prepared.batches]
    assert vit.processor is not None
    expected = vit.processor(images=IMAGE, return_tensors="pt")["pixel_values"]
    assert all(torch.equal(value, expected) for value in values)
    assert prepare(vit, images=str(files / "a.png")).texts == 1  # type: ignore[arg-type]  # one path alone


def test_media_that_cannot_be_read(vit: LoadedModel, whisper: LoadedModel, files: Path) -> None:
    for name in ("broken.png", "nowhere.png"):
        with pytest.raises(InputError, match=name) as caught:
            prepare(vit, images=[str(files / name)])
        assert "Pillow" in (caught.value.hint or "")
    for name in ("broken.wav", "nowhere.wav"):
        with pytest.raises(InputError, match=name) as caught:
            prepare(whisper, audio=[str(files / name)])
        assert "WAV" in (caught.value.hint or "")
    with pytest.raises(InputError, match="empty"):
        prepare(whisper, audio=[np.zeros(0)])


def test_extras_that_are_missing_are_named(
    vit: LoadedModel, whisper: LoadedModel, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(InputError) as caught:
        prepare(vit, images=[str(files / "a.png")])
    assert "headscope[vision]" in (caught.value.hint or "")
    with pytest.raises(InputError) as caught:
        prepare(whisper, audio=[str(files / "a.wav")])
    assert "headscope[audio]" in (caught.value.hint or "")


def test_models_refuse_what_they_do_not_take(vit: LoadedModel, whisper: LoadedModel, clip: LoadedModel) -> None:
    bert = wrap_model(tiny_model("bert"), wordpiece())
    for loaded, given, said in (
        (bert, {"images": [IMAGE]}, "takes text, not images"),
        (bert, {"audio": [np.zeros(9)]}, "takes text, not sounds"),
        (bert, {"texts": ["the"], "decoder_texts": ["the"]}, "no decoder"),
        (bert, {"texts": ["the"], "ids": [[1]]}, "both given"),
        (bert, {}, "no input"),
        (bert, {"texts": []}, "empty"),
        (vit, {"texts": ["the"]}, "takes images, not text"),
        (vit, {"ids": [[1]]}, "takes images, not text"),
        (whisper, {"texts": ["the"]}, "takes sounds, not text"),
        (clip, {"texts": ["the"]}, "needs both"),
        (clip, {"images": [IMAGE]}, "needs both"),
        (clip, {"texts": ["a", "b", "c"], "images": [IMAGE, IMAGE]}, "2 images for 3"),
    ):
        with pytest.raises(InputError, match=said):
            prepare(loaded, **given)  # type: ignore[arg-type]  # any combination


def test_models_without_a_processor_say_so() -> None:
    with pytest.raises(ModelError, match="no processor"):
        prepare(wrap_model(tiny_model("vit")), images=[IMAGE])


def test_sounds_are_mixed_to_one_channel_and_resampled(files: Path) -> None:
    samples, warning = load_sound(files / "a.wav", 22_050)
    assert warning is not None and "44100 to 22050" in warning
    expected = np.sin(np.arange(0, 4410, 2) / 9) * 0.2
    np.testing.assert_allclose(samples, expected, atol=1e-4)
    same, none = load_sound(files / "a.wav", 44_100)
    assert none is None
    assert len(same) == 4410


def test_sounds_with_given_and_generated_decoder_texts(whisper: LoadedModel, files: Path) -> None:
    given = prepare(whisper, audio=[files / "a.wav"], decoder_texts=["the cat"])
    (batch,) = given.batches
    assert batch.inputs["input_features"].shape == (1, 8, 100)
    assert batch.axes["decoder"].labels[0][1:] == ("the", "cat")
    assert int(batch.inputs["decoder_input_ids"][0, 0]) == 3
    assert batch.axes["decoder"].special[0].tolist() == [True, False, False]
    assert given.decoder_texts == ("the cat",)
    assert given.first_tokens == batch.axes["decoder"].labels[0]
    made = prepare(whisper, audio=[files / "a.wav"])
    assert made.decoder_texts is not None
    assert any("generated greedily" in warning for warning in made.warnings)
    assert 2 <= int(made.batches[0].axes["decoder"].lengths[0]) <= 21


def test_texts_with_images_go_through_the_composite_processor(clip: LoadedModel) -> None:
    prepared = prepare(clip, texts=["a cat", "the dog"], images=[IMAGE])
    assert [batch.order for batch in prepared.batches] == [(0,), (1,)]
    for batch in prepared.batches:
        with torch.no_grad():
            result = clip.model(**batch.inputs, output_attentions=True)
        n = int(batch.axes["text"].lengths[0])
        assert result.text_model_output.attentions[0].shape == (1, 4, n, n)
        assert batch.axes["text"].labels[0][0] == "<|startoftext|>"
        assert batch.axes["text"].special[0, [0, -1]].tolist() == [True, True]


@pytest.mark.parametrize("given", [{"texts": ["the cat"]}, {"texts": ["see <image> the cat"]}, {}])
def test_images_take_their_place_in_the_text(llava: LoadedModel, given: dict[str, list[str]]) -> None:
    (batch,) = prepare(llava, images=[IMAGE], **given).batches  # type: ignore[arg-type]  # texts only
    assert batch.axes["text"].labels[0].count("<image>") == 4
    with torch.no_grad():
        attentions = llava.model(**batch.inputs, output_attentions=True).attentions
    assert attentions[0].shape[-1] == int(batch.axes["text"].lengths[0])


def test_models_that_write_about_images_also_take_text_alone(llava: LoadedModel) -> None:
    assert prepare(llava, texts=["the cat"]).first_tokens == ("the", "cat")


@pytest.mark.parametrize(("family", "tokenizer"), [("t5", unigram), ("bart", unigram)])
def test_decoder_texts_follow_the_start_token(family: str, tokenizer: object) -> None:
    model = tiny_model(family, generating=True, decoder_start_token_id=0, eos_token_id=1, forced_eos_token_id=1)
    loaded = wrap_model(model, tokenizer())  # type: ignore[operator]  # a function
    (batch,) = prepare(loaded, texts=["the cat", "a dog , a house ."], decoder_texts=["a dog", "the mat"]).batches
    assert loaded.tokenizer is not None
    labels = loaded.tokenizer(["a dog", "the mat"])["input_ids"]
    for row, i in enumerate(batch.order):
        n = int(batch.axes["decoder"].lengths[row])
        assert batch.inputs["decoder_input_ids"][row, :n].tolist() == [0, *labels[i][:-1]]


def test_generation_is_greedy_and_the_same_in_batches() -> None:
    """Every generated token is the one that the model's own next-token scores put first."""
    loaded = wrap_model(tiny_model("t5", generating=True, decoder_start_token_id=0), unigram())
    prepared = prepare(loaded, texts=["the cat sat", "a dog"])
    for batch in prepared.batches:
        with torch.no_grad():
            best = loaded.model(**batch.inputs).logits.argmax(-1)
        for row in range(len(batch.order)):
            n = int(batch.axes["decoder"].lengths[row])
            assert n > 1
            assert batch.inputs["decoder_input_ids"][row, 2:n].tolist() == best[row, 1 : n - 1].tolist()
    assert prepared.decoder_texts is not None
    assert len(prepared.decoder_texts) == 2


def test_models_that_cannot_generate_ask_for_the_decoder_text(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        prepare(wrap_model(tiny_model("t5"), unigram()), texts=["the cat"])
    assert "--decoder-text" in (caught.value.hint or "")
    untied = save(tmp_path, "bart", byte_bpe(), tie_word_embeddings=False)
    with pytest.raises(InputError, match="no trained output head"):
        prepare(load_model(str(untied), need_generation=True), texts=["the cat"])


def test_long_decoder_texts_are_cut() -> None:
    loaded = wrap_model(tiny_model("bart", generating=True), byte_bpe())
    prepared = prepare(loaded, texts=["the cat"], decoder_texts=["the cat " * 60])
    assert prepared.batches[0].inputs["decoder_input_ids"].shape[1] == 40
    assert any("decoder" in warning and "cut to 40" in warning for warning in prepared.warnings)


def test_processor_files_are_read_as_they_are(clip: LoadedModel) -> None:
    file = Path(clip.name) / "processor_config.json"
    assert json.loads(file.read_text())["processor_class"] == "CLIPProcessor"
    assert type(clip.processor).__name__ == "CLIPProcessor"
    assert clip.tokenizer is clip.processor.tokenizer  # type: ignore[union-attr]  # it is there
