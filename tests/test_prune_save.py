"""Saving: what is in the directory, what loads from it, and what is left when it fails."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prune_cases import outputs, relative_difference, without_heads
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from fixtures.tokenizers import build_tokenizer, image_processor
from headscope.errors import CheckError, InputError, ModelError, ResourceError
from headscope.files import placing
from headscope.pruning import save
from headscope.pruning.directory import new_directory
from headscope.pruning.proof import prove
from headscope.pruning.report import Equivalence
from headscope.pruning.restore import restore

LLAMA = "0:4-7; 1:0,4"


@pytest.fixture(autouse=True)
def _short_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "prove", partial(prove, implementations=("eager",), generate=False))


def pruned(name: str, heads: Any) -> Any:
    model = build_family(name)
    headscope.prune_heads(model, heads)
    return model


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


# ------------------------------------------------------------------ what is in the directory
def test_config_keeps_original_numbers_and_says_the_plan(tmp_path: Path) -> None:
    report = headscope.save_pruned(pruned("llama", LLAMA), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 2)
    assert config["headscope"] == {
        "version": 1,
        "form": "structural",
        "heads": {"self.0": [4, 5, 6, 7], "self.1": [0, 4]},
        "zeroed": {},
        "original": {"self.0": [8, 2], "self.1": [8, 2]},
    }
    files = {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()}
    assert set(files) == {"config.json", "generation_config.json", "model.safetensors"}
    assert report.bytes == sum(files.values()) and report.equivalence.passed


def test_saving_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = pruned("llama", LLAMA)
    before, config = tensors(model), model.config.to_dict()
    for form in ("structural", "remote-code", "masked"):
        headscope.save_pruned(model, tmp_path / form, form=form)
    headscope.save_pruned(model, tmp_path / "uniform", form="uniform", pad=True)
    assert same(tensors(model), before) and model.config.to_dict() == config


def test_saved_again_it_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    headscope.save_pruned(pruned("gpt2", "0:1; 2:0,2"), tmp_path / "a")
    headscope.save_pruned(headscope.load(str(tmp_path / "a")), tmp_path / "b")
    headscope.load(str(tmp_path / "a")).save_pretrained(tmp_path / "c")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "c" / "model.safetensors").read_bytes()
    assert same(tensors(headscope.load(str(tmp_path / "c"))), tensors(headscope.load(str(tmp_path / "a"))))


def test_tokenizer_and_generation_config_come_along(tmp_path: Path) -> None:
    model = pruned("llama", LLAMA)
    model.generation_config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.5)
    headscope.save_pruned(model, tmp_path / "a", tokenizer=build_tokenizer("unigram_bos"))
    again = headscope.load(str(tmp_path / "a"))
    assert (again.generation_config.max_new_tokens, again.generation_config.repetition_penalty) == (7, 1.5)
    headscope.save_pruned(again, tmp_path / "b")  # the tokenizer that was loaded with it
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (tmp_path / "a" / "tokenizer.json").read_bytes()
    assert headscope.analyze(str(tmp_path / "b"), "the cat sat").heads


def test_image_processor_comes_along(tmp_path: Path) -> None:
    headscope.save_pruned(pruned("vit", "0:1"), tmp_path / "a", processor=image_processor(32))
    assert (tmp_path / "a" / "preprocessor_config.json").is_file()


# ------------------------------------------------------------------ what loads
def test_shards_ties_half_precision_and_device_map(tmp_path: Path) -> None:
    config = FAMILIES["llama"].config | {"tie_word_embeddings": True}
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).eval()
    headscope.prune_heads(model, LLAMA)
    headscope.save_pruned(model, tmp_path / "out", max_shard_size="40KB")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    again = headscope.load(str(tmp_path / "out"), device_map="cpu")
    assert same(tensors(again), tensors(model)) and again.dtype == torch.bfloat16
    assert again.lm_head.weight is again.model.embed_tokens.weight and type(again) is LlamaForCausalLM


def test_names_that_transformers_changes_on_loading(tmp_path: Path) -> None:
    model = pruned("vit", "0:1; 1:2,3")
    headscope.save_pruned(model, tmp_path / "out")
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "encoder.layer.0.attention.attention.query.weight" in file.keys()  # noqa: SIM118  # not a dict
    assert same(tensors(headscope.load(str(tmp_path / "out"))), tensors(model))


def test_bare_model_and_task_class(tmp_path: Path) -> None:
    headscope.save_pruned(pruned("llama", LLAMA), tmp_path / "out")
    assert type(headscope.load(str(tmp_path / "out"))).__name__ == "LlamaForCausalLM"
    assert type(headscope.load(str(tmp_path / "out"), own_class=False)).__name__ == "LlamaModel"


def test_pruning_in_steps_over_directories_is_pruning_at_once(tmp_path: Path) -> None:
    headscope.save_pruned(pruned("bert", "0:1"), tmp_path / "first")
    model = headscope.load(str(tmp_path / "first"))
    report = headscope.prune_heads(model, "0:1,3")
    assert any("already" in note for note in report.notes)
    headscope.save_pruned(model, tmp_path / "second")
    again = headscope.load(str(tmp_path / "second"))
    assert again.config.headscope["heads"] == {"self.0": [1, 3]}
    assert same(tensors(again), tensors(pruned("bert", "0:1,3")))


@pytest.mark.parametrize(("name", "heads"), [("phi3", "0:0,1; 1:0,2"), ("t5", "encoder.0:1,3; decoder.0:2; cross.1:3")])
def test_other_implementations_stay_exact_after_loading(name: str, heads: str, tmp_path: Path) -> None:
    headscope.save_pruned(pruned(name, heads), tmp_path / "out")
    model, original, inputs = headscope.load(str(tmp_path / "out")), build_family(name), example_inputs(FAMILIES[name])
    gone = model.config.headscope["heads"]
    with without_heads(original, gone):
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            original.set_attn_implementation(implementation)
            assert relative_difference(outputs(original, inputs), outputs(model, inputs)) < 1e-5


def test_static_cache_of_ones_own_takes_layers_that_differ(tmp_path: Path) -> None:
    model = pruned("llama", LLAMA)
    ids = torch.arange(10, 19)[None]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    wanted = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), wanted)
    cache = StaticCache(config=model.config, max_cache_len=32)
    assert torch.equal(model.generate(ids, cache=cache, prefill_chunk_size=4, **options), wanted)


def test_chunked_prefill_into_a_static_cache(tmp_path: Path) -> None:
    """transformers makes that cache by the config, before any keys come."""
    headscope.save_pruned(pruned("llama", LLAMA), tmp_path / "out")
    made = pruned("llama", LLAMA)
    ids = torch.arange(10, 19)[None]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    wanted = made.generate(ids, **options)
    for model in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made)), headscope.load(str(tmp_path / "out"))):
        given = model.generate(ids, cache_implementation="static", prefill_chunk_size=4, **options)
        assert torch.equal(given, wanted)


def test_continuous_batching_is_refused_where_key_value_heads_are_missing(tmp_path: Path) -> None:
    """And only there: it takes their number from the config."""
    headscope.save_pruned(pruned("llama", LLAMA), tmp_path / "out")
    for model in (pruned("llama", LLAMA), headscope.load(str(tmp_path / "out"))):
        with pytest.raises(NotImplementedError, match="uniform or masked"):
            model.generate_batch(inputs=[[10, 11, 12]])
    own = ("init_continuous_batching", "_get_static_cache_init_shape")
    assert not set(own) & set(vars(pruned("llama", "0:0,4; 1:1,5")))
    model = pruned("llama", LLAMA)
    assert set(own) <= set(vars(model))
    restore(model, model.config.headscope["heads"])
    assert not set(own) & set(vars(model))
    assert not set(own) & set(vars(pruned("bert", "0:1")))


def test_half_of_the_key_value_groups_is_half_of_the_cache(tmp_path: Path) -> None:
    headscope.save_pruned(pruned("llama", "0:4-7; 1:0-3; 2:4-7"), tmp_path / "out", form="uniform")
    numbers = {}
    for name, model in (
        ("before", build_family("llama")),
        ("after", AutoModelForCausalLM.from_pretrained(tmp_path / "out")),
    ):
        cache = model(torch.arange(10, 15)[None], use_cache=True).past_key_values
        numbers[name] = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert numbers["after"] * 2 == numbers["before"]


# ------------------------------------------------------------------ uniform
def test_uniform_writes_its_numbers_and_the_width_of_a_head(tmp_path: Path) -> None:
    headscope.save_pruned(pruned("llama", "0:4-7; 1:0-3; 2:4-7"), tmp_path / "out", form="uniform")
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 1, 8)
    assert config["headscope"]["config"] == {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "heads", "reason", "hint"),
    [
        ("llama", "0:4-7", "equally many heads", "--pad"),
        ("llama", "0:0,4; 1:1,5; 2:2,6", "not a multiple", "It takes 1-2,4 heads"),
        ("mistral", "0:0,1; 1:0,2", "0 2 (1 key-value)", "--pad"),
        ("bert", "0:1; 1:2; 2:3", "the width of a head", "structural"),
        ("bert", "0:1,0; 1:2,1; 2:3,2", "the width of a head", "masked"),
        ("gpt2", "0:1; 1:2; 2:3", "the width of a head", "remote-code"),
        ("gpt_neox", "0:1,3; 1:0,2", "the width of a head", "structural"),
        ("t5", {f"{s}.{n}": [n] for s, k in (("encoder", 3), ("decoder", 2), ("cross", 2)) for n in range(k)},
         "the same heads", "structural"),
    ],
)  # fmt: skip
def test_uniform_is_refused_with_the_reason(name: str, heads: Any, reason: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        headscope.save_pruned(pruned(name, heads), tmp_path / "out", form="uniform")
    assert reason in error.value.message.replace("self.", "") and hint in str(error.value.hint)
    assert not list(tmp_path.iterdir())


def test_padding_adds_zeros_up_to_the_largest_layer(tmp_path: Path) -> None:
    model = pruned("qwen3", "0:0,1; 1:1,3")  # (1 key-value head with 2 queries) and (2 with 1)
    report = headscope.save_pruned(model, tmp_path / "all", form="uniform", pad=True)
    assert any("neither smaller nor faster" in note for note in report.notes)
    model = pruned("vit", "0:1; 1:2,3")
    report = headscope.save_pruned(model, tmp_path / "vit", form="uniform", pad=True)
    assert report.heads == {"self.0": (1,), "self.1": (2, 3)} and report.zeroed == {"self.1": (2,)}
    again = headscope.load(str(tmp_path / "vit"))
    weight = next(v for k, v in again.named_parameters() if ".1." in k and k.endswith("o_proj.weight"))
    assert weight.shape == (32, 24) and not weight[:, 16:].any() and weight[:, :16].all()


def test_masked_keeps_shapes_and_zeroes_columns_of_the_output(tmp_path: Path) -> None:
    report = headscope.save_pruned(pruned("bert", "0:1,3"), tmp_path / "out", form="masked")
    assert any("neither smaller nor faster" in note for note in report.notes)
    found, original = tensors(headscope.load(str(tmp_path / "out"))), tensors(build_family("bert"))
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in original.items()}
    output = found["encoder.layer.0.attention.output.dense.weight"]
    assert not output[:, 8:16].any() and not output[:, 24:].any() and output[:, :8].all() and output[:, 16:24].all()


# ------------------------------------------------------------------ what is refused, and what remains
@pytest.mark.parametrize(
    ("options", "message"),
    [({"form": "pickle"}, "no form"), ({"form": "masked", "pad": True}, "padding is for uniform")],
)
def test_wrong_options(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        headscope.save_pruned(pruned("bert", "0:1"), tmp_path / "out", **options)


def test_existing_directories_are_replaced_only_with_force(tmp_path: Path) -> None:
    model, out = pruned("bert", "0:1"), tmp_path / "out"
    headscope.save_pruned(model, out)
    (out / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="exists"):
        headscope.save_pruned(model, out)
    headscope.prune_heads(model, "0:2")
    headscope.save_pruned(model, out, force=True)
    assert not (out / "mine.txt").exists() and [p.name for p in tmp_path.iterdir()] == ["out"]
    assert headscope.load(str(out)).config.headscope["heads"] == {"self.0": [1, 2]}


def test_what_is_no_model_is_never_replaced(tmp_path: Path) -> None:
    model = pruned("bert", "0:1")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("home", "file", "missing/out"):
        with pytest.raises(InputError):
            headscope.save_pruned(model, tmp_path / name, force=True)
    assert (tmp_path / "home" / "letter.txt").exists() and (tmp_path / "file").read_text() == "x"
    headscope.save_pruned(model, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


@pytest.mark.parametrize(
    "full",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
)
def test_full_disk_leaves_nothing(full: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pruned("bert", "0:1")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise full

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    with pytest.raises(ResourceError, match="no space left"):
        headscope.save_pruned(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_full_disk_while_replacing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rename = pruned("bert", "0:1"), os.rename
    headscope.save_pruned(model, tmp_path / "out")
    before = (tmp_path / "out" / "config.json").read_bytes()

    def fail(source: Any, target: Any) -> None:
        if str(source).endswith(".part") and not os.path.exists(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(placing, "exchange", lambda a, b: False)
    monkeypatch.setattr(placing.os, "rename", fail)
    headscope.prune_heads(model, "0:2")
    with pytest.raises(ResourceError):
        headscope.save_pruned(model, tmp_path / "out", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_bytes() == before


@pytest.mark.parametrize("form", ["structural", "remote-code", "masked"])
def test_what_loads_as_something_else_is_not_kept(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, write = pruned("bert", "0:1"), save._write

    def spoil(model: Any, config: Any, folder: Path, *rest: Any) -> None:
        with torch.no_grad():
            kept = model.encoder.layer[0].output.dense.weight.clone()
            model.encoder.layer[0].output.dense.weight *= 1.01
            write(model, config, folder, *rest)
            model.encoder.layer[0].output.dense.weight.copy_(kept)

    monkeypatch.setattr(save, "_write", spoil)
    with pytest.raises(CheckError, match="loads as something else"):
        headscope.save_pruned(model, tmp_path / "out", form=form)
    assert not list(tmp_path.iterdir())


def test_what_does_not_load_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "load_plainly", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no such code")))
    with pytest.raises(ModelError, match="does not load again: no such code"):
        headscope.save_pruned(pruned("bert", "0:1"), tmp_path / "out", form="masked")
    assert not list(tmp_path.iterdir())


def test_comparison_is_handed_on(tmp_path: Path) -> None:
    found: Equivalence = headscope.save_pruned(pruned("bert", "0:1"), tmp_path / "out").equivalence
    assert found.passed and found.relative == 0.0 and found.checks


KILLED = r"""
import os, signal, sys
import transformers.modeling_utils as modeling
import headscope
from fixtures.building import build_family
write = modeling.safe_save_file
def killed(*args, **kwargs):
    write(*args, **kwargs)
    os.write(1, b"written\n")
    signal.pause()
modeling.safe_save_file = killed
model = build_family("bert")
headscope.prune_heads(model, "0:1")
headscope.save_pruned(model, sys.argv[1])
"""


def test_killed_while_saving_there_is_nothing_under_the_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    paths = {"PYTHONPATH": str(Path(headscope.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], env=os.environ | paths, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.") and left.suffix == ".part"
    with new_directory(out) as folder:  # the next time what was left is removed
        assert [p.name for p in tmp_path.iterdir()] == [folder.name]
        (folder / "config.json").write_text("{}")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_a_process_that_runs_are_left_alone(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as other:
        with new_directory(tmp_path / "out"):
            pass
        assert other.is_dir()
        (tmp_path / "out").rmdir()


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ dequantised models
class _Quantizer:
    """As transformers leaves one on a model that it read from a GGUF file."""

    quantization_config = type("Config", (), {"quant_method": "gguf"})()

    def is_serializable(self) -> bool:
        return False


def test_a_dequantised_model_is_saved_without_its_quantizer(tmp_path: Path) -> None:
    model = pruned("llama", LLAMA)
    model.hf_quantizer, model.config.quantization_config = _Quantizer(), {"quant_method": "gguf"}
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "plain")
    headscope.save_pruned(model, tmp_path / "out")
    assert isinstance(model.hf_quantizer, _Quantizer) and model.config.quantization_config
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert same(tensors(headscope.load(str(tmp_path / "out"))), tensors(model))
