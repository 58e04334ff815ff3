"""Every form of every family, loaded in fresh processes: with headscope, and where headscope cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from prune_cases import outputs, relative_difference, varied_heads, without_heads

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.pruning import save
from headscope.pruning.proof import prove

NAMES = ("bert", "gpt2", "gpt_neox", "llama", "qwen3", "t5", "vit", "bloom", "phi3", "mistral", "albert")
# Equally many heads everywhere; for T5 the same ones.
EQUAL = {
    "llama": "0:4-7; 1:0-3; 2:4-7",
    "mistral": "0:2,3; 1:0,1",
    "qwen3": "0:0,2; 1:1,3",
    "phi3": "0:0,1; 1:2,3",
    "vit": "0:1; 1:2",
    "t5": "encoder.0:1; encoder.1:1; encoder.2:1; decoder.0:2; decoder.1:2; cross.0:0; cross.1:3",
}
PLAIN_READER = """
import importlib.abc, json, sys
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "headscope":
            raise ImportError(name)
sys.meta_path.insert(0, Without())
import torch, transformers
root, results = sys.argv[1], {}
for name, form, auto in json.loads(sys.argv[2]):
    place = f"{root}/{name}.{form}"
    inputs = torch.load(f"{root}/{name}.inputs")
    if form == "structural" or (form == "remote-code" and name in ("bert", "llama")):
        try:
            getattr(transformers, auto).from_pretrained(place)
            results[f"{name}.{form}.refused"] = "loaded"
        except Exception as error:
            results[f"{name}.{form}.refused"] = f"{type(error).__name__}: {error}"
    if form == "structural":
        continue
    for cls in {auto, "AutoModel"}:
        trust = form == "remote-code"
        if cls != auto and not trust:
            continue
        model = getattr(transformers, cls).from_pretrained(
            place, trust_remote_code=trust, attn_implementation="eager").eval()
        with torch.no_grad():
            given = model(**inputs).to_tuple()
        results[f"{name}.{form}.{cls}"] = [t for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if name == "llama" and cls == auto and form != "uniform":
            ids = inputs["input_ids"][:1, :5]
            options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False)
            results[f"llama.{form}.generated"] = [
                model.generate(ids, **options),
                model.generate(ids, cache_implementation="static", prefill_chunk_size=2, **options),
            ]
            if form == "remote-code":
                try:
                    model.generate_batch(inputs=[[10, 11]])
                except NotImplementedError as error:
                    results["llama.batches"] = str(error)
        if cls == "AutoModel" and name in ("bert", "llama"):
            model.save_pretrained(f"{place}.again")
assert "headscope" not in sys.modules
torch.save(results, f"{root}/plain.results")
"""
READER = """
import json, sys, torch, headscope
root, results = sys.argv[1], {}
for name in json.loads(sys.argv[2]):
    model = headscope.load(f"{root}/{name}.structural")
    with torch.no_grad():
        given = model(**torch.load(f"{root}/{name}.inputs")).to_tuple()
        model.set_attn_implementation("sdpa")
        other = model(**torch.load(f"{root}/{name}.inputs")).to_tuple()
    for key, value in (("eager", given), ("sdpa", other)):
        results[f"{name}.{key}"] = [t for t in value if isinstance(t, torch.Tensor) and t.is_floating_point()]
    results[f"{name}.type"] = (type(model).__module__, type(model).__name__)
torch.save(results, f"{root}/headscope.results")
"""
AUTO = {"bert": "AutoModel", "vit": "AutoModel", "albert": "AutoModel", "t5": "AutoModelForSeq2SeqLM"}


def run(script: str, *argv: str) -> None:
    paths = os.pathsep.join([str(Path(headscope.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        env=os.environ | {"PYTHONPATH": paths, "HF_MODULES_CACHE": f"{argv[0]}/modules"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All forms of all families on disk. Saving itself compares one forward pass only here: the readers do it again."""
    root = tmp_path_factory.mktemp("forms")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "prove", partial(prove, implementations=("eager",), generate=False))
        for name in NAMES:
            model = build_family(name)
            torch.save(example_inputs(FAMILIES[name]), root / f"{name}.inputs")
            headscope.prune_heads(model, plan(name))
            for form in ("structural", "remote-code", "masked"):
                headscope.save_pruned(model, root / f"{name}.{form}", form=form)
            if name in EQUAL:
                equal = build_family(name)
                headscope.prune_heads(equal, EQUAL[name])
                headscope.save_pruned(equal, root / f"{name}.uniform", form="uniform")
    return root


def plan(name: str) -> dict[str, list[int]]:
    if name == "albert":  # one module serves all layers
        return {"self.0": [1], "self.1": [2]}
    return varied_heads(FAMILIES[name])


@pytest.fixture(scope="module")
def plain(root: Path) -> dict:
    auto = {name: AUTO.get(name, "AutoModelForCausalLM") for name in NAMES}
    jobs = [(n, form, auto[n]) for n in NAMES for form in ("structural", "remote-code", "masked")]
    jobs += [(n, "uniform", auto[n]) for n in EQUAL]
    run(PLAIN_READER, str(root), json.dumps(jobs))
    return torch.load(root / "plain.results")


@pytest.fixture(scope="module")
def ours(root: Path) -> dict:
    run(READER, str(root), json.dumps(NAMES))
    return torch.load(root / "headscope.results")


@pytest.fixture(scope="module")
def wanted() -> Callable[[str, object], list[torch.Tensor]]:
    """What the original gives without the heads, by hooks that know nothing of pruning."""

    def expected(name: str, heads: dict[str, list[int]]) -> list[torch.Tensor]:
        model, inputs = build_family(name), example_inputs(FAMILIES[name])
        with without_heads(model, heads):
            return real(outputs_of(model, inputs), inputs)

    return expected


def outputs_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        given = model(**inputs).to_tuple()
    return [t for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()]


def real(tensors: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    mask = inputs.get("attention_mask")
    return [t[mask.bool()] if mask is not None and t.shape[:2] == mask.shape else t for t in tensors]


def read(text: str) -> dict[str, list[int]]:
    """A plan of `EQUAL` with layers by stack."""
    found = {}
    for part in text.replace(" ", "").split(";"):
        layer, heads = part.split(":")
        numbers = [n for item in heads.split(",") for n in span(item)]
        found[layer if "." in layer else f"self.{layer}"] = numbers
    return found


def span(item: str) -> range:
    first, _, last = item.partition("-")
    return range(int(first), int(last or first) + 1)


def removed(name: str, form: str) -> dict[str, list[int]]:
    if form == "uniform":
        return read(EQUAL[name])
    if name == "albert":
        return {f"self.{layer}": [1, 2] for layer in range(1)}
    return plan(name)


@pytest.mark.parametrize("form", ["remote-code", "masked", "uniform"])
@pytest.mark.parametrize("name", NAMES)
def test_transformers_alone_loads_it(name: str, form: str, plain: dict, wanted: Callable, root: Path) -> None:
    if form == "uniform" and name not in EQUAL:
        return
    inputs = torch.load(root / f"{name}.inputs")
    given = plain[f"{name}.{form}.{AUTO.get(name, 'AutoModelForCausalLM')}"]
    assert relative_difference(wanted(name, removed(name, form)), real(given, inputs)) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_headscope_loads_structural(name: str, ours: dict, wanted: Callable, root: Path) -> None:
    inputs = torch.load(root / f"{name}.inputs")
    for implementation in ("eager", "sdpa"):
        given = real(ours[f"{name}.{implementation}"], inputs)
        assert relative_difference(wanted(name, removed(name, "structural")), given) < 1e-5
    module, cls = ours[f"{name}.type"]
    assert cls == FAMILIES[name].model_class and module.startswith("transformers.models.")


@pytest.mark.parametrize("name", NAMES)
def test_plain_loading_of_structural_fails_loudly(name: str, plain: dict) -> None:
    assert plain[f"{name}.structural.refused"].startswith("RuntimeError")
    assert "ignore_mismatched_sizes" in plain[f"{name}.structural.refused"]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_remote_code_is_refused_unless_trusted_and_saved_again_with_its_code(
    name: str, plain: dict, root: Path
) -> None:
    assert "trust_remote_code=True" in plain[f"{name}.remote-code.refused"]
    again = root / f"{name}.remote-code.again"
    first = (root / f"{name}.remote-code" / "modeling_headscope.py").read_text("utf-8")
    assert (again / "modeling_headscope.py").read_text("utf-8") == first
    assert "headscope" not in first.replace("headscope_", "").replace("by headscope", "")
    config = json.loads((again / "config.json").read_text("utf-8"))
    assert "AutoModel" in config["auto_map"] and config["model_type"] == f"headscope_{name}"


def test_remote_code_generates_with_every_cache_that_there_is(plain: dict) -> None:
    model, ids = build_family("llama"), example_inputs(FAMILIES["llama"])["input_ids"][:1, :5]
    with without_heads(model, plan("llama")):
        wanted = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    for form in ("remote-code", "masked"):
        assert all(torch.equal(given, wanted) for given in plain[f"llama.{form}.generated"])
    assert "continuous batching" in plain["llama.batches"]


@pytest.mark.parametrize("name", NAMES)
def test_auto_map_names_the_bare_model_and_the_task_class(name: str, root: Path, plain: dict) -> None:
    auto_map = json.loads((root / f"{name}.remote-code" / "config.json").read_text("utf-8"))["auto_map"]
    assert {"AutoConfig", "AutoModel", AUTO.get(name, "AutoModelForCausalLM")} <= set(auto_map)
    assert auto_map[AUTO.get(name, "AutoModelForCausalLM")].endswith(f".Pruned{FAMILIES[name].model_class}")
    assert plain[f"{name}.remote-code.AutoModel"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["remote-code", "masked", "uniform"])
def test_headscope_loads_the_other_forms_in_original_numbers(name: str, form: str, root: Path) -> None:
    if form == "uniform" and name not in EQUAL:
        return
    model = headscope.load(str(root / f"{name}.{form}"))
    if (name, form) == ("t5", "uniform"):
        assert not hasattr(model.config, "headscope")  # its heads are counted anew
        return
    heads = {name: sorted(heads) for name, heads in removed(name, form).items()}
    if name == "albert":
        heads = {f"self.{layer}": [1, 2] for layer in range(3)}
    assert model.config.headscope["heads"] == heads
    assert type(model).__name__ == FAMILIES[name].model_class
    inputs = torch.load(root / f"{name}.inputs")
    original = build_family(name)
    with without_heads(original, removed(name, form)):
        assert relative_difference(outputs(original, inputs), outputs(model, inputs)) < 1e-5
