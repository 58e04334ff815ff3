"""Repairs against models whose truth is known, and against the same least squares on whole forward passes."""

from __future__ import annotations

import copy
import gc
import threading

import numpy as np
import pytest
import torch
from repair_cases import batch_of, batches_of, cut_out, family_batches, llama, masked, random_texts
from transformers import GraniteConfig

from fixtures.building import build_family
from fixtures.families import FAMILIES
from headscope.capture.evaluation import configs_of
from headscope.capture.outputs import find_outputs
from headscope.errors import InputError, ModelError
from headscope.repair import repair as module
from headscope.repair.needs import needs
from headscope.repair.places import find_places
from headscope.repair.repair import repair

HEADS = {"self.0": [1], "self.1": [0, 3], "self.2": [2]}


def logits(model, batches):
    with torch.no_grad():
        found = [model(**b.inputs).logits[b.inputs["attention_mask"].bool()] for b in batches]
    return torch.cat(found)


def relative(a, b) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


# ------------------------------------------------------------------ the truth can be recovered
def with_copies(heads, **config):
    """A model in which, in each layer, some heads attend as head 2 does, with its values, times two, turned about."""
    model = llama(torch.float64, **config)
    with torch.no_grad():
        for name, numbers in heads.items():
            attention = model.model.layers[int(name[5:])].self_attn
            for head in numbers:
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                    rows = projection.weight.view(4, 8, 32)
                    rows[head] = rows[2]
                rows[head] = 2 * rows[2].flip(0)
    return model


@pytest.mark.parametrize("remove", [masked, cut_out])
@pytest.mark.parametrize(
    "config", [{}, {"config": GraniteConfig, "residual_multiplier": 0.4}], ids=["llama", "granite"]
)
def test_heads_that_others_hold_are_made_up_for_wholly(remove, config) -> None:
    heads = {"self.0": [1], "self.1": [0, 3], "self.2": [1]}
    original = with_copies(heads, **config)
    after = remove(original, heads)
    texts, others = batches_of(random_texts(60), 12), batches_of(random_texts(10, seed=7), 5)
    wanted = logits(original, others)
    assert relative(logits(after, others), wanted) > 0.05
    report = repair(original, after, texts, ridges=(1e-12,))
    assert relative(logits(after, others), wanted) < 1e-4
    assert all(r.kept and r.error_before > 1e-3 and r.error_after < 1e-8 for r in report.layers)


# ------------------------------------------------------------------ brute force
def brute_force(original, pruned, texts, steps, ridges):
    """Whole forward passes of one text at a time for each projection, and NumPy.

    steps: (path of the projection, path of what reads its stream, columns) in order.
    """

    def run(model, path, ids):
        seen = []
        hook = model.get_submodule(path).register_forward_pre_hook(lambda m, args: seen.append(args[0][0].double()))
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]))
        hook.remove()
        return seen[0].numpy()

    chosen = []
    for projection, reader, columns in steps:
        weight = pruned.get_submodule(projection).weight.detach()  # (out, in)
        xs, ys, ws, held = [], [], [], []
        for number, ids in enumerate(texts):
            target, stream = run(original, reader, ids), run(pruned, reader, ids)
            x = run(pruned, projection, ids)
            xs.append(x[:, columns])
            ys.append(target - (stream - x @ weight.double().numpy().T))
            ws.append(1 / np.maximum((target**2).mean(1), (stream**2).mean(1)))
            held.append(np.full(len(ids), number % 5 == 4))
        x, y, w, held = (np.concatenate(part) for part in (xs, ys, ws, held))
        old = weight[:, columns].double().numpy()

        def solve(rows, ridge, x=x, y=y, w=w, old=old):
            xx = (w[rows, None] * x[rows]).T @ x[rows]
            missing = (w[rows, None] * (y[rows] - x[rows] @ old.T)).T @ x[rows]
            return old + missing @ np.linalg.inv(xx + ridge * np.mean(np.diag(xx)) * np.eye(len(xx)))

        def error(rows, new, x=x, y=y, w=w):
            return (w[rows, None] * (y[rows] - x[rows] @ new.T) ** 2).sum()

        ridge = min(ridges, key=lambda r: error(held, solve(~held, r)))
        chosen.append(ridge)
        assert error(held, solve(~held, ridge)) < error(held, old)
        weight[:, columns] = torch.from_numpy(solve(np.ones_like(held), ridge)).to(weight)
    return chosen


def columns_without(gone, kept_only):
    kept = [h for h in range(4) if h not in gone]
    places = range(len(kept)) if kept_only else kept
    return [8 * p + i for p in places for i in range(8)]


@pytest.mark.parametrize(("remove", "mlp"), [(masked, False), (cut_out, False), (masked, True)])
def test_weights_are_those_of_brute_force(remove, mlp) -> None:
    original = llama()
    heads = {"self.1": [0, 3], "self.2": [2]}  # layer 0 stays as it is
    after, slow = remove(original, heads), remove(original, heads)
    texts = random_texts(40)
    steps = []
    for layer in (1, 2):
        path = f"model.layers.{layer}"
        columns = columns_without(heads[f"self.{layer}"], remove is cut_out)
        steps.append((f"{path}.self_attn.o_proj", f"{path}.post_attention_layernorm", columns))
        if mlp:
            reader = "model.norm" if layer == 2 else f"model.layers.{layer + 1}.input_layernorm"
            steps.append((f"{path}.mlp.down_proj", reader, list(range(48))))
    ridges = (1e-3, 1e-2, 1e-1, 1.0)
    report = repair(original, after, batches_of(texts, 7), mlp=mlp, ridges=ridges)
    assert [r.ridge for r in report.layers] == brute_force(original, slow, texts, steps, ridges)
    for name, wanted in slow.state_dict().items():
        given = after.state_dict()[name]
        assert relative(given, wanted) < 1e-4, name
        assert mlp or "o_proj" in name or torch.equal(given, original.state_dict().get(name)) or remove is cut_out
    assert (
        relative(
            after.state_dict()[f"{steps[0][0]}.weight"], remove(original, heads).state_dict()[f"{steps[0][0]}.weight"]
        )
        > 0.01
    )
    assert report.texts == 40 and report.tokens == sum(map(len, texts))
    assert report.held_back == sum(len(t) for i, t in enumerate(texts) if i % 5 == 4)


def test_masked_heads_stay_zero_and_are_as_if_cut_out() -> None:
    original, texts = llama(), batches_of(random_texts(40), 10)
    zeroed, cut = masked(original, HEADS), cut_out(original, HEADS)
    repair(original, zeroed, texts)
    repair(original, cut, texts)
    for layer, gone in enumerate(HEADS.values()):
        weight = zeroed.model.layers[layer].self_attn.o_proj.weight
        lost = [8 * h + i for h in gone for i in range(8)]
        assert not weight[:, lost].any()
        rest = weight[:, columns_without(gone, False)]
        torch.testing.assert_close(rest, cut.model.layers[layer].self_attn.o_proj.weight, rtol=1e-3, atol=1e-4)


def test_batches_do_not_matter() -> None:
    original, texts = llama(), random_texts(40)
    found = []
    for size in (1, 6, 40):
        after = masked(original, HEADS)
        repair(original, after, batches_of(texts, size)[::-1])
        found.append(after.state_dict())
    for other in found[1:]:
        for name, weight in found[0].items():
            torch.testing.assert_close(other[name], weight, rtol=1e-3, atol=1e-4)


def test_padding_does_not_count() -> None:
    """What stands behind the texts, and how far it reaches, changes nothing."""
    original, texts = llama(), random_texts(20)
    weights = []
    for filler, longest in ((0, 0), (9, 30)):
        batch = batch_of(dict(enumerate([*texts, [5] * longest] if longest else texts)))
        rows = slice(0, len(texts))
        inputs = {name: t[rows] for name, t in batch.inputs.items()}
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, filler)
        axis = copy.copy(batch.axes["text"])
        object.__setattr__(axis, "lengths", axis.lengths[rows])
        object.__setattr__(axis, "special", axis.special[rows])
        after = masked(original, HEADS)
        report = repair(original, after, (type(batch)(inputs, {"text": axis}, batch.order[rows]),))
        assert report.tokens == sum(map(len, texts))
        weights.append(after.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------ families
FAMILY_NAMES = ["bert", "distilbert", "gpt2", "gpt_neox", "falcon_gqa", "llama", "gemma3", "t5", "bart", "opt"]


@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_families_come_closer_in_every_layer(name, mlp) -> None:
    family, original = FAMILIES[name], build_family(name)
    before = {key: t.clone() for key, t in original.state_dict().items()}
    outputs = find_outputs(original)
    after = masked(original, {o.name: [i % 2] for i, o in enumerate(outputs)})
    texts = family_batches(family, 60, 12)
    wanted, lost = last(original, texts), last(after, texts)
    report = repair(original, after, texts, mlp=mlp)
    assert {o.name for o in outputs} <= {r.name for r in report.layers}
    assert (len(report.layers) > len(outputs)) == (mlp and name != "gemma3")
    assert all(r.error_after <= r.error_before and r.held_after <= r.held_before for r in report.layers)
    assert sum(r.kept for r in report.layers) >= len(report.layers) / 2
    assert (last(after, texts) - wanted).norm() < 0.95 * (lost - wanted).norm()
    assert all(torch.equal(t, before[key]) for key, t in original.state_dict().items())


def last(model, batches):
    """What a model gives in the end, real tokens only."""
    found = []
    for batch in batches:
        with torch.no_grad():
            output = model(**batch.inputs)
        mask = batch.inputs.get("decoder_attention_mask", batch.inputs["attention_mask"]).bool()
        found.append((output.logits if "logits" in output else output.last_hidden_state)[mask])
    return torch.cat(found).float()


# ------------------------------------------------------------------ models as they were
def test_models_are_as_before_but_for_the_refitted_weights() -> None:
    original, texts = llama(), batches_of(random_texts(60), 20)
    after = masked(original, HEADS)
    original.train()
    after.model.layers[0].self_attn.o_proj.weight.requires_grad_(False)
    with torch.no_grad():
        original(**texts[0].inputs), after(**texts[0].inputs)
    kept = [(m, described(m)) for m in (original, after)]
    weights = [{k: t.clone() for k, t in m.state_dict().items()} for m in (original, after)]
    threads = threading.enumerate()
    repair(original, after, texts)
    assert threading.enumerate() == threads
    assert all(described(model) == before for model, before in kept)
    assert all(torch.equal(t, weights[0][k]) for k, t in original.state_dict().items())
    changed = {k for k, t in after.state_dict().items() if not torch.equal(t, weights[1][k])}
    assert changed == {f"model.layers.{i}.self_attn.o_proj.weight" for i in range(3)}


def described(model):
    """All but numbers: modes, gradients, hooks, identities and dtypes of parameters."""
    modules = [(id(m), m.training, [*m._forward_hooks], [*m._forward_pre_hooks]) for m in model.modules()]
    implementations = [c._attn_implementation for c in configs_of(model)]
    return modules, implementations, [(id(p), p.dtype, p.requires_grad, p.grad) for p in model.parameters()]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_goes_wrong_leaves_everything_as_it_was(monkeypatch, error) -> None:
    original, texts = llama(), batches_of(random_texts(20), 5)
    after = masked(original, HEADS)
    with torch.no_grad():
        original(**texts[0].inputs), after(**texts[0].inputs)
    weights = {k: t.clone() for k, t in after.state_dict().items()}
    kept, threads = [(m, described(m)) for m in (original, after)], threading.enumerate()
    calls = []

    def fails(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return refit(*arguments)

    refit = module.refit
    monkeypatch.setattr(module, "refit", fails)
    with pytest.raises(error):
        repair(original, after, texts)
    assert threading.enumerate() == threads
    assert all(described(model) == before for model, before in kept)
    assert all(torch.equal(t, weights[k]) for k, t in after.state_dict().items())


def test_half_precision_keeps_its_dtype_and_comes_near_what_full_precision_gives() -> None:
    texts = batches_of(random_texts(60), 12)
    changes = {}
    for dtype in (torch.float32, torch.bfloat16):
        original = llama().bfloat16().to(dtype)
        after, before = masked(original, HEADS), masked(original, HEADS)
        assert all(r.kept for r in repair(original, after, texts, ridges=(0.01,)).layers)
        assert all(p.dtype == dtype for p in after.parameters())
        layers = [m.model.layers[1].self_attn.o_proj.weight.float() for m in (after, before)]
        changes[dtype] = layers[0] - layers[1]
    assert relative(changes[torch.bfloat16], changes[torch.float32]) < 0.15


def test_a_layer_without_heads_is_passed_over_and_the_next_makes_up_for_it() -> None:
    original, texts = llama(), batches_of(random_texts(40), 8)
    for remove in (masked, cut_out):
        after = remove(original, {"self.0": [0, 1, 2, 3], "self.1": [1]})
        report = repair(original, after, texts)
        assert [(r.name, r.kept) for r in report.layers] == [("self.0", False), ("self.1", True)]
        assert not after.model.layers[0].self_attn.o_proj.weight.any()


def test_few_texts_are_held_back_in_part() -> None:
    original = llama()
    after = masked(original, HEADS)
    report = repair(original, after, batches_of(random_texts(2, low=20, high=21), 2))
    assert (report.texts, report.tokens, report.held_back) == (2, 40, 8)


def test_layers_can_be_named() -> None:
    original, texts = llama(), batches_of(random_texts(20), 5)
    after = masked(original, HEADS)
    assert [r.name for r in repair(original, after, texts, layers=["self.2", "self.1"]).layers] == ["self.1", "self.2"]
    assert torch.equal(
        after.model.layers[0].self_attn.o_proj.weight, masked(original, HEADS).model.layers[0].self_attn.o_proj.weight
    )


def test_the_report_is_json() -> None:
    original = llama()
    found = repair(original, masked(original, {"self.1": [0]}), batches_of(random_texts(20), 5)).to_dict()
    assert set(found) == {"layers", "mlp", "texts", "tokens", "held_back"}
    assert found["layers"][0]["name"] == "self.1" and found["layers"][0]["ridge"] > 0


# ------------------------------------------------------------------ refusals
def refused(original, after, batches, match, kind=ModelError, **options) -> None:
    before = {k: t.clone() for k, t in after.state_dict().items() if not t.is_meta}
    with pytest.raises(kind, match=match) as caught:
        repair(original, after, batches, **options)
    assert caught.value.hint
    assert all(
        torch.equal(t.nan_to_num(), before[k].nan_to_num()) for k, t in after.state_dict().items() if k in before
    )


def test_refusals() -> None:
    original, texts = llama(), batches_of(random_texts(6), 3)
    after = masked(original, HEADS)
    refused(original, copy.deepcopy(original), texts, "no layer lost heads")
    refused(original, after, (), "no texts", InputError)
    refused(original, after, texts, "no ridges", InputError, ridges=())
    refused(original, original, texts, "beside", InputError)
    refused(original, after, texts, r"no layer self\.9", InputError, layers=["self.9"])
    tied = masked(original, HEADS)
    tied.model.layers[1].self_attn.o_proj.weight = tied.model.layers[0].self_attn.o_proj.weight
    refused(original, tied, texts, "shared weights cannot be refitted")
    refused(original, masked(original, HEADS).to("meta"), texts, "not in memory")


def test_shared_layers_are_refused() -> None:
    original = build_family("albert")
    texts = family_batches(FAMILIES["albert"], 6, 3)
    refused(original, masked(original, {"self.0": [1]}), texts, "shared weights cannot be refitted")


def test_numbers_that_are_not_finite_are_refused() -> None:
    original, texts = llama(), batches_of(random_texts(6), 3)
    after = masked(original, HEADS)
    with torch.no_grad():
        after.model.embed_tokens.weight[texts[0].inputs["input_ids"][0, 0]] = float("nan")
    refused(original, after, texts, "not finite")


def test_layers_that_do_not_run_are_refused() -> None:
    original, texts = llama(), batches_of(random_texts(6), 3)
    after = masked(original, HEADS)
    for model in (original, after):
        model.config.num_hidden_layers = 2  # how many of its layers the model runs
    refused(original, after, texts, r"layers\.2\.self_attn\.o_proj does not run")


# ------------------------------------------------------------------ needs
def test_needs_are_about_what_is_held(monkeypatch) -> None:
    original, texts = llama(), batches_of(random_texts(64, low=31, high=32), 8)
    after, lines, held = masked(original, HEADS), [], []
    gc.collect()
    known = {id(t) for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}

    def look(*arguments):
        found = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if issubclass(type(t), torch.Tensor) and id(t) not in known and t.dtype == torch.float32
        }
        held.append(sum(found.values()))
        return refit(*arguments)

    refit = module.refit
    monkeypatch.setattr(module, "refit", look)
    repair(original, after, texts, report=lines.append)
    said = needs(original, find_places(original, after, texts[0]), 64 * 31)
    assert lines == [said.line] and said.tokens == 64 * 31
    assert f"{64 * 31:,} tokens" in said.line
    assert 0.6 < max(held) / said.activations < 1.6
    assert said.sums > 8 * 4 * 32**2 and said.bytes == said.activations + said.sums
    assert 2 < said.passes < 4
    more = needs(original, find_places(original, after, texts[0], mlp=True), 64 * 31)
    assert more.activations > said.activations and more.passes > said.passes
