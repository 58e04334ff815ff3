"""Ablation against brute force: columns of output projections zeroed, whole passes, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from single_head_cases import (
    assert_untouched,
    build,
    inputs_changed,
    loss_alone,
    places,
    ranked,
    snapshot,
    task_of,
    texts,
    two_heads_matter,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.errors import InputError, ModelError
from headscope.importance.ablation import ablation
from headscope.importance.partial import giving, layers_of, record

NAMES = ("llama", "bert", "gpt2", "t5", "albert")
IDS = texts((12, 7, 9, 5, 12))


def losses_alone(name: str, model: PreTrainedModel) -> tuple[np.ndarray, np.ndarray]:
    """Of each text: its loss summed over what it predicts, and the number of that."""
    with torch.no_grad():
        found = [loss_alone(name, model, row, i) for i, row in enumerate(IDS)]
    return np.array([float(loss) * n for loss, n in found]), np.array([n for _, n in found])


def added(after: np.ndarray, before: np.ndarray, count: np.ndarray) -> tuple[float, float]:
    """The mean of what is added to a prediction's loss, and its standard error: that of a ratio of two sums."""
    ratio = (after - before).sum() / count.sum()
    rest = after - before - ratio * count
    return ratio, rest.std(ddof=0) * np.sqrt(len(rest) / (len(rest) - 1)) * np.sqrt(len(rest)) / count.sum()


def input_means(name: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """The mean of what goes into each output projection, by its path, over all calls and tokens of texts alone."""
    seen: dict[str, list[Tensor]] = {path: [] for path, _, _ in places(name).values()}

    def note(path: str):
        return lambda context: (seen[path].append(context.flatten(0, -2).double()), context)[1]

    with inputs_changed(model, {path: note(path) for path in seen}):
        losses_alone(name, model)
    return {path: torch.cat(found).mean(0).float() for path, found in seen.items()}


class _Without:
    """A model some of whose heads give nothing, or their mean: their columns are zero and a bias makes up for it."""

    def __init__(self, module: nn.Module, columns: Sequence[int], mean: Tensor | None) -> None:
        self.module, self.columns, self.mean = module, list(columns), mean
        self.weight = module.weight if hasattr(module, "nx") else module.weight.T  # (in, out)
        self.before = self.weight.detach().clone()

    def __enter__(self) -> None:
        self.handle = None
        with torch.no_grad():
            if self.mean is not None:
                constant = self.mean[self.columns] @ self.weight[self.columns]
                self.handle = self.module.register_forward_hook(lambda module, args, result: result + constant)
            self.weight[self.columns] = 0

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            self.weight.copy_(self.before)
        if self.handle is not None:
            self.handle.remove()


@pytest.mark.parametrize("how", ["zero", "mean"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_brute_force(name: str, how: str) -> None:
    model = build(name)
    units = ("head", "kv-group") if name == "llama" else ("head",)
    scored = ablation(task_of(name, model, IDS, 4, replace=how, units=units))
    means = input_means(name, model) if how == "mean" else {}
    before, count = losses_alone(name, model)
    for layer, (path, heads, size) in places(name).items():
        module = model.get_submodule(path)
        width = len(_Without(module, [], None).weight) // heads
        for unit, of_unit in (("head", 1), ("kv-group", size)):
            if unit not in units:
                continue
            found = scored[unit, layer]
            assert len(found.scores) == heads // of_unit
            for place in range(heads // of_unit):
                start = place * of_unit * width
                with _Without(module, range(start, start + of_unit * width), means.get(path)):
                    after, _ = losses_alone(name, model)
                wanted = added(after, before, count)
                np.testing.assert_allclose((found.scores[place], found.errors[place]), wanted, rtol=1e-5, atol=1e-6)
                assert abs(wanted[0]) > 1e-5


@pytest.mark.parametrize("how", ["zero", "mean"])
@pytest.mark.parametrize("name", ["llama", "t5", "distilbert"])
def test_batches_and_order_of_texts_do_not_matter(name: str, how: str) -> None:
    model = build(name)
    ways = [(IDS, 1), (IDS, 8), (IDS[::-1], 3)]
    first, *others = (ablation(task_of(name, model, ids, size, replace=how)) for ids, size in ways)
    for other in others:
        for key, found in first.items():
            np.testing.assert_allclose(other[key].scores, found.scores, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(other[key].errors, found.errors, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_finds_the_two_heads_that_matter(how: str) -> None:
    heads = [(0, 2), (2, 1)]
    scored = ablation(task_of("llama", two_heads_matter(heads), IDS, replace=how))
    for unit, size in (("head", 1), ("kv-group", 2)):
        found = {key: np.abs(layer.scores) for key, layer in scored.items()}
        largest = sorted((float(s), n, i) for (u, n), layer in found.items() if u == unit for i, s in enumerate(layer))
        assert {(n, i) for _, n, i in largest[-2:]} == {(f"self.{layer}", head // size) for layer, head in heads}
        assert largest[-2][0] > 5 * largest[-3][0]
    assert ranked(scored)[0] in {(f"self.{layer}", head) for layer, head in heads}


# ------------------------------------------------------------------ what is not run again
def calls_of(model: PreTrainedModel, paths: Sequence[str], run) -> dict[str, int]:
    """How often the modules at these paths compute anything."""
    counts = dict.fromkeys(paths, 0)

    def count(path: str):
        def change(context: Tensor) -> Tensor:
            counts[path] += 1
            return context

        return change

    with inputs_changed(model, {path: count(path) for path in paths}):
        run()
    return counts


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "t5"])
def test_only_what_comes_after_a_head_is_run(name: str) -> None:
    model = build(name)
    paths = [path for path, _, _ in places(name).values()]
    counts = calls_of(model, paths, lambda: ablation(task_of(name, model, IDS, 8, units=("head",))))
    # For how many modules a change is not behind: those of layers up to the module's own. All of the encoder is before
    # the decoder, and self-attention is before cross-attention in the same layer.
    stacks = {"encoder": [1, 2, 3], "decoder": [4, 6, 8], "cross": [5, 7, 9]} if name == "t5" else {"self": [1, 2, 3]}
    changes = [n for numbers in stacks.values() for n in numbers]
    # Two whole passes, one to warm up and one that is recorded. For each module that a change is tried in, one to see
    # that skipping is sound, and one for each head.
    assert [counts[path] for path in paths] == [2 + 5 * n for n in changes]


def test_cost_is_told_before_it_starts() -> None:
    model, lines = build("llama"), []
    task = task_of("llama", model, IDS, 4, report=lines.append)
    assert not lines
    ablation(task)
    assert len(lines) == 1
    words = lines[0].split()
    assert words[:6] == ["ablation:", "18", "trials", "on", "5", "texts,"]
    # Four heads and two groups in each of three layers; those of the first take whole passes.
    assert 6 <= float(words[words.index("forward") - 1]) <= 18
    assert words[-1] in ("s", "min", "h")


class _Remembering(nn.Module):
    """A layer that leaves something behind for the next, other than what it returns."""

    def __init__(self, layer: nn.Module, before: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.notes = layer, {}
        self.earlier = None if before is None else before.notes

    def forward(self, hidden: Tensor, *args, **kwargs) -> Tensor:
        if self.earlier is not None:
            hidden = hidden + 0.5 * self.earlier.pop("last").roll(1, -1)
        result = self.layer(hidden, *args, **kwargs)
        self.notes["last"] = result
        return result


def test_layers_that_leave_things_behind_are_run_again() -> None:
    model = build("llama")
    layers: list[nn.Module] = []
    for layer in model.model.layers:
        layers.append(_Remembering(layer, layers[-1] if layers else None))
    model.model.layers = nn.ModuleList(layers)
    task = task_of("llama", model, IDS)
    scored, (before, count) = ablation(task), losses_alone("llama", model)
    for output in task.outputs:
        for place in range(4):
            with _Without(output.module, range(8 * place, 8 * place + 8), None):
                after, _ = losses_alone("llama", model)
            wanted = added(after, before, count)
            np.testing.assert_allclose(scored["head", output.name].scores[place], wanted[0], rtol=1e-5, atol=1e-6)


def kept_layers(name: str, model: PreTrainedModel) -> dict[str, list[str]]:
    """The paths of the layers that are not run again, by `stack.layer`."""
    task, layers = task_of(name, model, IDS, 8), layers_of(model)
    with torch.no_grad():
        _, recorded = record(layers, task.outputs, lambda: task.data.loss.of(model, task.data.batches[0]))
    return {output.name: sorted(layers[m] for m in found) for output, found in recorded.kept.items()}


def test_what_is_written_into_is_not_kept() -> None:
    model = build("gpt2")
    model.transformer.h[1].register_forward_pre_hook(lambda module, args: (args[0].mul_(1.1), *args[1:]))
    assert kept_layers("gpt2", model) == {"self.0": [], "self.1": [], "self.2": ["transformer.h.1"]}


def test_what_is_called_several_times_is_not_kept() -> None:
    model = build("albert", num_hidden_layers=4, num_hidden_groups=2)
    assert kept_layers("albert", model) == {"self.0": [], "self.2": []}


def test_layers_give_what_they_gave_within_the_block_only() -> None:
    model = build("gpt2")
    layer, given = model.transformer.h[0], torch.zeros(1, 2, 32)
    before, hidden = dict(vars(layer)), torch.ones(1, 2, 32)
    with giving({layer: given}):
        assert layer(hidden) is given
    assert vars(layer).keys() == before.keys()
    assert not torch.equal(layer(hidden), given)
    layer.forward = own = lambda hidden: 2 * hidden
    with giving({layer: given}):
        assert layer(hidden) is given
    assert layer.forward is own


# ------------------------------------------------------------------ around it
@pytest.mark.parametrize("how", ["zero", "mean"])
@pytest.mark.parametrize("name", NAMES)
def test_model_is_left_as_it_was(name: str, how: str) -> None:
    model = build(name)
    before = snapshot(model)
    ablation(task_of(name, model, IDS, replace=how))
    assert_untouched(model, before)


def test_model_is_left_as_it_was_after_an_error() -> None:
    model = build("llama")
    before = snapshot(model)

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    task = task_of("llama", model, IDS)
    task.data.batches[-1].inputs["input_ids"] += 1000
    with pytest.raises(IndexError):
        ablation(task)
    with pytest.raises(KeyboardInterrupt):
        ablation(replace(task_of("llama", model, IDS), report=stop))
    assert_untouched(model, before)


def test_wrong_tasks_are_refused() -> None:
    task = task_of("gpt2", build("gpt2"), IDS)
    with pytest.raises(InputError, match="replaced by 'noise'"):
        ablation(replace(task, replace="noise"))
    with pytest.raises(InputError, match="there are none"):
        ablation(replace(task, data=None))


def test_modules_that_texts_do_not_reach_are_refused() -> None:
    idle = build("gpt2")
    idle.transformer.h[1].attn.forward = lambda *args, **kwargs: (torch.zeros_like(args[0]), None)
    with pytest.raises(ModelError, match=r"transformer\.h\.1\.attn computes nothing"):
        ablation(task_of("gpt2", idle, IDS))
