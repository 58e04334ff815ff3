"""Checkpoints from somebody who means harm: none of their code runs, they read nothing outside and build no giants."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

import headscope
from headscope.errors import HeadscopeError, ModelError
from headscope.models.loading import load_model, read_config
from headscope.models.model_classes import auto_class, concrete_class, own_class_of, writing_class
from headscope.models.promises import MOST_LAYERS, check_numbers
from tests.tiny_checkpoints import byte_bpe, save, wordpiece

BIN = "pytorch_model.bin"
SAFE = "model.safetensors"
OWN = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoModelForMaskedLM": "own.OwnModel"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bert"), "bert", wordpiece())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama", byte_bpe())


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A directory that appears as soon as a payload runs."""
    return tmp_path / "canary"


class Payload:
    """What, unpickled, makes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (self.canary,)


def pickled(canary: Path) -> bytes:
    return pickle.dumps(Payload(canary))


def edit(directory: Path, name: str = "config.json", **changes: Any) -> None:
    file = directory / name
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | changes))


def plant(directory: Path, canary: Path) -> None:
    """Code of the checkpoint's own that makes the canary when it is imported, under the names that might be."""
    code = f"import os\nos.makedirs({str(canary)!r}, exist_ok=True)\n"
    code += "".join(f"class Own{kind}:\n    pass\n" for kind in ("Config", "Model", "Tokenizer", "Processor"))
    code += "def generate(model, *args, **kwargs):\n    return None\n"
    (directory / "custom_generate").mkdir()
    for name in ("own.py", "custom_generate/generate.py", "__init__.py", "setup.py", f"{directory.name}.py"):
        (directory / name).write_text(code)


def refused(call: Callable[[], Any], exit_code: int = 3) -> HeadscopeError:
    """The error of something that is not done: one short line and a hint."""
    with pytest.raises(HeadscopeError) as caught:
        call()
    error = caught.value
    assert error.exit_code == exit_code
    assert "\n" not in error.message and len(error.message) < 600
    assert error.hint and "\n" not in error.hint
    return error


# ------------------------------------------------------------------ code
CODE: dict[str, Callable[[Path], None]] = {
    "auto_map of a known type": lambda d: edit(d, auto_map=OWN),
    "auto_map in another repository": lambda d: edit(d, auto_map={k: f"evil/repo--{v}" for k, v in OWN.items()}),
    "auto_map of the class that was saved": lambda d: edit(d, auto_map=OWN, architectures=["OwnModel"]),
    "auto_map of an unknown type": lambda d: edit(d, auto_map=OWN, model_type="own"),
    "auto_map that is no map": lambda d: edit(d, auto_map=["own.OwnModel"]),
    "auto_map with a key of another kind": lambda d: edit(d, auto_map={"Trainer": "own.OwnModel"}),
    "tokenizer's auto_map": lambda d: edit(
        d, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}
    ),
    "tokenizer's auto_map and class": lambda d: edit(
        d,
        "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]},
        tokenizer_class="OwnTokenizer",
    ),
    "tokenizer's auto_map in the configuration": lambda d: edit(d, auto_map={"AutoTokenizer": "own.OwnTokenizer"}),
    "processor's auto_map": lambda d: edit(
        d, "processor_config.json", auto_map={"AutoProcessor": "own.OwnProcessor"}, processor_class="OwnProcessor"
    ),
    "image processor's auto_map": lambda d: edit(
        d, "preprocessor_config.json", auto_map={"AutoImageProcessor": "own.OwnProcessor"}
    ),
    "custom_generate": lambda d: edit(d, "generation_config.json", custom_generate=str(d), auto_map=OWN),
    "a kernel for attention": lambda d: edit(
        d,
        attn_implementation="kernels-community/evil",
        _attn_implementation="evil/kernel:function",
        _attn_implementation_internal="evil/kernel",
    ),
    "a kernel for experts": lambda d: edit(d, experts_implementation="evil/kernel"),
    "kernels": lambda d: edit(d, use_kernels=True, kernel_config={"RMSNorm": "evil/kernel:Norm"}),
    "an adapter of another model": lambda d: edit(
        d, "adapter_config.json", base_model_name_or_path="evil/repo", peft_type="LORA", auto_mapping=OWN
    ),
    "a quantizer of its own": lambda d: edit(d, quantization_config={"quant_method": "own", "code": "own.OwnModel"}),
    "a dtype that is a function": lambda d: edit(d, torch_dtype="load", dtype="load"),
    "training arguments": lambda d: torch.save(Payload(d.parent / "canary"), d / "training_args.bin"),
    "metadata of a distributed checkpoint": lambda d: (d / ".metadata").write_bytes(pickled(d.parent / "canary")),
    "a pickled tokenizer": lambda d: torch.save(Payload(d.parent / "canary"), d / "tokenizer.pkl"),
}  # fmt: skip


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("kind", CODE)
def test_no_code_of_a_checkpoint_runs(
    kind: str, family: str, tmp_path: Path, canary: Path, request: pytest.FixtureRequest
) -> None:
    """Whether it loads or is refused, with its own class or a bare one, as a model or as a configuration only."""
    model = Path(shutil.copytree(request.getfixturevalue(family), tmp_path / "model"))
    plant(model, canary)
    CODE[kind](model)
    for load in (load_model, lambda name: load_model(name, own_class=True, writes=True), read_config):
        try:
            load(str(model))
        except ModelError as error:
            assert "\n" not in error.message
    assert not canary.exists()


def test_the_payload_would_run_if_it_were_trusted(bert: Path, tmp_path: Path, canary: Path) -> None:
    """Otherwise the tests above would show nothing."""
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    plant(model, canary)
    CODE["auto_map of an unknown type"](model)
    refused(lambda: load_model(str(model), trust_remote_code=True))
    assert canary.exists()
    canary.rmdir()
    torch.load(_pickle(tmp_path / "p.bin", canary), weights_only=False)
    assert canary.exists()


def _pickle(file: Path, canary: Path, **how: Any) -> Path:
    torch.save({"embeddings.word_embeddings.weight": Payload(canary)}, file, **how)
    return file


def _two_files(directory: Path, canary: Path) -> None:
    """An index whose second file has the payload."""
    weights = load_file(directory / SAFE)
    first = f"{BIN[:-4]}-00001-of-00002.bin"
    second = _pickle(directory / f"{BIN[:-4]}-00002-of-00002.bin", canary).name
    torch.save(weights, directory / first)
    places = dict.fromkeys(weights, first) | {"embeddings.word_embeddings.weight": second}
    (directory / f"{BIN}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _inside_a_zip(directory: Path, canary: Path) -> None:
    """The payload in a member that torch itself would not write."""
    with zipfile.ZipFile(_pickle(directory / BIN, canary), "a") as archive:
        archive.write(_pickle(directory / "inner", canary, _use_new_zipfile_serialization=False), "archive/code/own.py")


PICKLES: dict[str, Callable[[Path, Path], object]] = {
    "a zip archive": lambda d, c: _pickle(d / BIN, c),
    "the format of old": lambda d, c: _pickle(d / BIN, c, _use_new_zipfile_serialization=False),
    "several files": _two_files,
    "more in the archive": _inside_a_zip,
    "a pickle under the name of safetensors": lambda d, c: _pickle(d / SAFE, c),
    "a bare pickle": lambda d, c: (d / BIN).write_bytes(b"cos\nmkdir\n(V" + str(c).encode() + b"\ntR."),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_no_pickle_runs_code(kind: str, bert: Path, tmp_path: Path, canary: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    PICKLES[kind](model, canary)
    if kind != "a pickle under the name of safetensors":
        (model / SAFE).unlink()
    refused(lambda: load_model(str(model)))
    assert not canary.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.mkdir('canary') }}",
        "{% set x = messages.append(1) %}",
        "{{ raise_exception.__globals__['os'].mkdir('canary') }}",
    ],
)
def test_a_chat_template_stays_in_its_sandbox(
    template: str, llama: Path, tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(template)
    refused(lambda: headscope.analyze(str(model), "a cat", chat=True))
    assert not canary.exists()


@pytest.mark.parametrize(
    "name", ["RagRetriever", "AutoTokenizer", "Trainer", "TrainingArguments", "pipeline", "models", "__name__",
             "PreTrainedModel", "no.such", "", 5, None, ["BertModel"], {"a": 1}]
)  # fmt: skip
def test_a_configuration_names_models_only(name: object) -> None:
    """What else transformers has is not what anybody loads, such as classes that read pickles."""
    config = BertConfig()
    config.architectures = [name]
    config.auto_map = (
        {name: "own.OwnModel", "RagRetriever": [name], "AutoModel": name} if isinstance(name, str) else name
    )
    for choose in (own_class_of, writing_class, lambda c: auto_class(c, False)):
        assert concrete_class(choose(config), config).__module__.startswith("transformers.models.bert")
    config.architectures = name
    assert concrete_class(own_class_of(config), config) is BertModel


# ------------------------------------------------------------------ files elsewhere
OUTSIDE = [
    "../outside/{}",
    "{root}/outside/{}",
    "sub/../../outside/{}",
    "..\\outside\\{}",
    "C:\\outside\\{}",
    "~/{}/..",
    "",
]


@pytest.mark.parametrize("place", OUTSIDE)
@pytest.mark.parametrize("file", [SAFE, BIN])
def test_an_index_names_files_of_its_own_directory(place: str, file: str, bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    weights = load_file(model / SAFE)
    (model / SAFE).unlink()
    (model / "sub").mkdir()
    (tmp_path / "outside").mkdir()
    (save_file if file == SAFE else torch.save)(weights, tmp_path / "outside" / file)
    where = place.format(file, root=tmp_path)
    (model / f"{file}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, where)}))
    assert "outside of the checkpoint's directory" in refused(lambda: load_model(str(model))).message


def test_an_index_of_files_below_is_fine(bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    weights = load_file(model / SAFE)
    (model / "sub").mkdir()
    (model / SAFE).rename(model / "sub" / SAFE)
    places = {"metadata": {}, "weight_map": dict.fromkeys(weights, f"sub/{SAFE}")}
    (model / f"{SAFE}.index.json").write_text(json.dumps(places))
    assert load_model(str(model)).missing == ()


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": 5}', "{", '{"weight_map": {"a": [1]}}', "[" * 100_000])
def test_an_index_that_is_none(text: str, bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    (model / f"{SAFE}.index.json").write_text(text)
    assert f"{SAFE}.index.json is not an index" in refused(lambda: load_model(str(model))).message


def test_a_configuration_names_weights_of_its_own_directory(bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    (model / SAFE).rename(tmp_path / SAFE)
    edit(model, transformers_weights=f"../{SAFE}")
    assert "inside the model directory" in refused(lambda: load_model(str(model))).message
    edit(model, transformers_weights="other.safetensors.index.json")
    (model / "other.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": f"../{SAFE}"}}))
    assert "outside of the checkpoint's directory" in refused(lambda: load_model(str(model))).message


def test_a_tokenizer_names_files_of_its_own_directory(bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    for name in ("tokenizer_file", "vocab_file", "added_tokens_file", "special_tokens_map_file", "chat_template_file"):
        edit(model, "tokenizer_config.json", **{name: str(tmp_path / "tokenizer.json")})
    edit(model, "tokenizer_config.json", fast_tokenizer_files=["../tokenizer.json", str(tmp_path / "tokenizer.json")])
    assert load_model(str(model)).tokenizer is None


# ------------------------------------------------------------------ giants
@pytest.mark.parametrize("key", ["num_hidden_layers", "depths", "n_layer", "num_experts", "encoder_layers", "x_depth"])
@pytest.mark.parametrize("value", [10**9, 10**100, MOST_LAYERS + 1])
def test_more_layers_than_there_can_be(key: str, value: int) -> None:
    for config in ({key: value}, {"text_config": {key: value}}, {key: [2, value]}, {"a": [{"b": {key: value}}]}):
        assert key in refused(lambda c=config: check_numbers(c)).message
    check_numbers({key: MOST_LAYERS, "vocab_size": 10**9, "layer_norm_eps": 1e-12, "max_position_embeddings": 10**7})


@pytest.mark.parametrize("change", [
    {"num_hidden_layers": 10**9},
    {"model_type": "unheard", "num_layers": 10**9},
    {"headscope": {"version": 1, "heads": {}, "original": {}, "config": {"num_hidden_layers": 10**9}}},
    {"pruned_heads": {"0": [1]}, "num_hidden_layers": 10**9},
])  # fmt: skip
def test_a_giant_is_refused_at_once(change: dict[str, Any], bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    edit(model, **change)
    start = time.monotonic()
    for load in (load_model, read_config, headscope.size):
        assert "more than the 4,096" in refused(lambda load=load: load(str(model))).message
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("change", [{"hidden_size": 10**12}, {"vocab_size": 10**13}, {"intermediate_size": 10**14}])
def test_a_wide_giant_is_no_traceback(change: dict[str, int], bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    edit(model, **change)
    with pytest.raises(HeadscopeError) as caught:
        load_model(str(model))
    assert caught.value.exit_code in (3, 4) and "\n" not in caught.value.message


WIDE = b'{"a": {"dtype": "F32", "shape": [1152921504606846976], "data_offsets": [0, 4]}}'
FILES: dict[str, tuple[str, bytes]] = {
    "a header of 2^60 bytes": (SAFE, struct.pack("<Q", 1 << 60) + b"{}"),
    "tensors of 2^60 bytes": (SAFE, struct.pack("<Q", len(WIDE)) + WIDE + b"1234"),
    "deep JSON": ("config.json", b'{"model_type": "bert", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of 100,000 digits": ("config.json", b'{"model_type": "bert", "x": ' + b"1" * 100_000 + b"}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_bombs(kind: str, bert: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    name, data = FILES[kind]
    (model / name).write_bytes(data)
    start = time.monotonic()
    refused(lambda: load_model(str(model)))
    assert time.monotonic() - start < 10
