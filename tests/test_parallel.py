"""Work on all cores at a time gives what one thread gives, and leaves torch's settings alone."""

from __future__ import annotations

import threading

import pytest
import torch

import headscope
from fixtures.building import build_family, example_inputs
from fixtures.families import FAMILIES
from headscope.attention.parallel import in_parallel
from headscope.attention.streaming import attend
from headscope.attention.tiles import Terms
from headscope.attention.visibility import Target, Visibility

CPU = torch.device("cpu")


@pytest.fixture(params=[2, 3])
def threads(request):
    """Some threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_item_is_done_once_by_threads_with_one_core_each(threads):
    done, seen = [], set()

    def work(items):
        for item in items:
            done.append(item)
            seen.add((threading.current_thread().name, torch.get_num_threads()))

    in_parallel(work, list(range(500)), CPU)
    assert sorted(done) == list(range(500))
    assert {cores for _, cores in seen} == {1} and all(name.startswith("headscope") for name, _ in seen)
    assert torch.get_num_threads() == threads
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [threads], "new threads are as they were"


def test_a_fault_is_the_callers_and_nothing_runs_on(threads):
    running = []

    def work(items):
        for item in items:
            running.append(item)
            if item == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_parallel(work, list(range(50)), CPU)
    count = len(running)
    in_parallel(lambda items: list(items), [1, 2], CPU)
    assert len(running) == count


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attention_is_that_of_one_thread(threads, causal, mode):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 700, 16), torch.randn(2, 2, 700, 16), torch.randn(2, 2, 700, 16)
    some, bias = torch.rand(1, 1, 700, 700) < 0.9, torch.nn.Parameter(torch.randn(1, 6, 1, 700))
    found = {}
    for count in (1, threads):
        torch.set_num_threads(count)
        with mode():
            view = Visibility(700, 700, causal, None if causal else some)
            context, weights = attend(query, key, value, view, Terms(0.25, biases=(bias,)))
            found[count] = (context, weights.entropy(), weights.at(Target(offset=-1)))
    for one, several in zip(found[1], found[threads], strict=True):
        assert float((one - several).abs().max()) < 1e-5


def test_a_model_is_measured_alike(threads):
    model, inputs = build_family("llama"), example_inputs(FAMILIES["llama"])
    inputs = {name: t.repeat(1, 40) for name, t in inputs.items()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    several = headscope.analyze(model, inputs=inputs, metrics="all")
    with torch.inference_mode():
        again = headscope.analyze(model, inputs=inputs, metrics="all")
    torch.set_num_threads(1)
    one = headscope.analyze(model, inputs=inputs, metrics="all")
    for a, b, c in zip(one.heads, several.heads, again.heads, strict=True):
        for name, value in a.metrics.items():
            if value is None:
                assert b.metrics[name] is None and c.metrics[name] is None
                continue
            assert b.metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5)
            assert c.metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5)
