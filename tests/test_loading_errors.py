"""Loading what is not in order: one line, a hint, exit code 3, nothing executed, no long wait."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from headscope.errors import HeadscopeError, InputError, ModelError, ResourceError
from headscope.models import loading
from headscope.models.checkpoint import explain_load_error, judge_load_report
from headscope.models.loading import load_model
from tests.tiny_checkpoints import byte_bpe, save, tiny_model, wordpiece


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bert"), "bert", wordpiece())


@pytest.fixture
def copy(bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "model"))


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def drop(*names: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "model.safetensors"
        weights = load_file(file)
        kept = {k: v for k, v in weights.items() if not any(name in k for name in names)}
        assert len(kept) < len(weights)
        save_file(kept, file, metadata={"format": "pt"})

    return change


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a weights file": (cut, "damaged weights"),
    "no safetensors": (lambda d: (d / "model.safetensors").write_bytes(b"not weights at all"), "damaged weights"),
    "an empty weights file": (lambda d: (d / "model.safetensors").write_bytes(b""), "damaged weights"),
    "no weights file": (lambda d: (d / "model.safetensors").unlink(), "no file named"),
    "no configuration": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "a broken configuration": (lambda d: (d / "config.json").write_text("{ not json"), "not a valid JSON"),
    "no model type": (lambda d: edit_config(d, model_type=None), "model_type"),
    "an unknown model type": (lambda d: edit_config(d, model_type="perceptron9000"), "perceptron9000"),
    "another width": (lambda d: edit_config(d, hidden_size=64), "has shape"),
    "more layers than weights": (lambda d: edit_config(d, num_hidden_layers=3), "encoder.layer.2"),
    "no query weights": (drop("query"), "query"),
    "no word embeddings": (drop("word_embeddings"), "word_embeddings"),
    "no feed-forward weights": (drop("layer.1.intermediate"), "intermediate"),
    "weights of another model": (drop("encoder", "embeddings"), "37 weights"),
}


def fails(exit_code: int, *arguments: object, **options: object) -> HeadscopeError:
    with pytest.raises(HeadscopeError) as caught:
        load_model(*arguments, **options)  # type: ignore[arg-type]  # any arguments at all
    error = caught.value
    assert error.exit_code == exit_code
    assert "\n" not in error.message
    assert len(error.message) < 600
    assert error.hint and "\n" not in error.hint
    return error


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_checkpoints_are_named(kind: str, copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, said = BROKEN[kind]
    change(copy)
    error = fails(3, str(copy))
    assert said in error.message
    assert capfd.readouterr() == ("", "")


def test_a_missing_pooler_is_nothing_and_a_missing_head_one_line(copy: Path, tmp_path: Path) -> None:
    drop("pooler")(copy)
    assert load_model(str(copy)).warnings == []
    bart = save(tmp_path / "bart", "bart", byte_bpe(), tie_word_embeddings=False)
    loaded = load_model(str(bart), need_generation=True)
    assert loaded.missing == ("lm_head.weight",)
    assert loaded.warnings == ["newly initialised, not in the checkpoint: lm_head.weight"]


@pytest.mark.parametrize(
    ("key", "fatal"),
    [
        ("pooler.dense.weight", False),
        ("classifier.0.weight", False),
        ("lm_head.weight", False),
        ("text_model.pooler.bias", False),
        ("encoder.layer.0.head.weight", True),
        ("head.attention.in_proj_weight", True),
        ("encoder.conv1.weight", True),
        ("shared.weight", True),
    ],
)
def test_which_missing_weights_matter(key: str, fatal: bool) -> None:
    """Whatever lies on the way to an attention weight does; heads and poolers outside the layers do not."""
    report = {"missing_keys": {key}, "mismatched_keys": set()}
    if fatal:
        with pytest.raises(ModelError, match=key):
            judge_load_report("m", report)
    else:
        assert judge_load_report("m", report)[1] == (key,)


def test_a_misshapen_head_is_no_reason_to_refuse(copy: Path) -> None:
    file = copy / "model.safetensors"
    save_file(load_file(file) | {"pooler.dense.bias": torch.zeros(7)}, file, metadata={"format": "pt"})
    assert load_model(str(copy)).missing == ("pooler.dense.bias",)


def test_a_pickle_that_runs_code_is_not_run(copy: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(copy / "sprung"),)

    (copy / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Trap()}, copy / "pytorch_model.bin")
    assert "not unpickled" in fails(3, str(copy)).message
    assert not (copy / "sprung").exists()


def test_a_checkpoints_own_code_runs_only_when_allowed(copy: Path) -> None:
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    edit_config(copy, model_type="own", auto_map=auto_map)
    (copy / "own.py").write_text(f"import os\nos.mkdir({str(copy / 'ran')!r})\n")
    error = fails(3, str(copy))
    assert "--trust-remote-code" in (error.hint or "")
    assert not (copy / "ran").exists()
    fails(3, str(copy), trust_remote_code=True)
    assert (copy / "ran").exists()


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/model", "~/nowhere", "a/b/c", "nowhere.gguf", "a b", "", "x/y/z.gguf", "..", "a\\b"]
)
def test_names_that_cannot_be_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = fails(3, name).message
    assert (name or "name is empty") in message
    assert ("no such file" in message) == (name == "nowhere.gguf")


def test_a_file_is_not_a_directory(copy: Path) -> None:
    assert "is a file" in fails(3, str(copy / "model.safetensors")).message
    (copy / "broken.gguf").write_bytes(b"GGUF?")
    fails(3, str(copy / "broken.gguf"))


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_name_without_a_network_fails_at_once(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    start = time.monotonic()
    error = fails(3, "no-such-owner/no-such-model")
    assert time.monotonic() - start < 5
    assert "Hub cannot be reached" in error.message


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "xpu:7"])
def test_devices_that_are_not_there(device: str, bert: Path) -> None:
    fails(2, str(bert), device=device)


@pytest.mark.parametrize("dtype", ["float99", "int8", "nn", "", torch.int64])
def test_dtypes_that_are_none(dtype: object, bert: Path) -> None:
    fails(2, str(bert), dtype=dtype)


def test_another_tokenizer_that_does_not_load(bert: Path, tmp_path: Path) -> None:
    assert "tokenizer" in fails(3, str(bert), tokenizer=str(tmp_path)).message


def test_out_of_memory_is_a_resource_error(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "_from_pretrained", full)
    assert isinstance(fails(4, str(bert)), ResourceError)


def test_explanations_keep_our_own_errors_and_say_which_package_is_missing() -> None:
    own = InputError("a", "b")
    assert explain_load_error("m", own, local=True) is own
    missing = explain_load_error("m", ImportError("needs natten\n\nlong text"), local=True)
    assert isinstance(missing, ModelError)
    assert missing.message == "m: a package is missing: needs natten"


def test_the_tiny_model_is_whole(bert: Path) -> None:
    """The broken copies above are broken by what was done to them, not before."""
    assert load_model(str(bert)).model.num_parameters() == tiny_model("bert").num_parameters()
