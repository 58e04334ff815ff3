"""Forward passes that pause: they compute what they would compute alone, and leave nothing behind."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from repair_cases import batches_of, llama, random_texts

from headscope.capture.outputs import find_outputs
from headscope.repair.lockstep import ForwardPass, Pause, forward_passes
from headscope.repair.streams import find_streams


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def batches():
    return batches_of(random_texts(9), 3)


@pytest.fixture
def streams(model, batches):
    outputs = find_outputs(model)
    paths = {id(m): p for p, m in model.named_modules()}
    return tuple(find_streams(model, {paths[id(o.module)]: o.module for o in outputs}, batches[0])[0].values())


def hooks(model):
    return [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


@pytest.fixture(autouse=True)
def nothing_is_left(model, batches):
    """After each test: as many threads and the same hooks as before, once transformers has put in its own."""
    with torch.no_grad():
        model(**batches[0].inputs)
    threads, before = threading.enumerate(), hooks(model)
    yield
    assert threading.enumerate() == threads
    assert hooks(model) == before


def read_alone(model, batch, path):
    """What a module reads in an ordinary forward pass."""
    seen = []
    handle = model.get_submodule(path).register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))
    with torch.no_grad():
        model(**batch.inputs)
    handle.remove()
    return seen[0]


def test_passes_pause_at_each_stream_with_its_value(model, batches, streams) -> None:
    wanted = [[read_alone(model, b, s.event.path) for b in batches] for s in streams]
    with forward_passes(model, batches, streams) as passes:
        for stream, values in zip(streams, wanted, strict=True):
            for one, value in zip(passes, values, strict=True):
                at = one.resume()
                assert at.stream == stream
                assert torch.equal(at.value, value)
                assert not at.value.requires_grad and at.inputs is None
        assert [one.resume() for one in passes] == [None] * len(passes)
        assert passes[0].resume() is None


def test_inputs_of_projections_are_kept(model, batches, streams) -> None:
    keep = {s.projection: model.get_submodule(s.projection) for s in streams}
    wanted = read_alone(model, batches[1], streams[0].projection)
    with forward_passes(model, batches, streams, keep) as passes:
        assert torch.equal(passes[1].resume().inputs, wanted)


def test_what_is_written_into_a_stream_is_as_if_the_projection_had_given_it(model, batches, streams) -> None:
    more = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    handle = model.get_submodule(streams[0].projection).register_forward_hook(lambda m, args, out: out + more)
    wanted = read_alone(model, batches[2], streams[2].event.path)
    handle.remove()
    with forward_passes(model, batches, streams) as passes:
        passes[2].resume().value.add_(more)
        passes[2].resume()
        torch.testing.assert_close(passes[2].resume().value, wanted, rtol=1e-4, atol=1e-4)


def test_only_one_runs_at_a_time() -> None:
    running, most = [], []

    def work(one: list[ForwardPass]) -> None:
        for _ in range(20):
            running.append(1)
            most.append(len(running))
            running.pop()
            one[0].pause(Pause(None, torch.zeros(1), None))

    passes = []
    for _ in range(5):
        held: list[ForwardPass] = []
        held.append(ForwardPass(lambda held=held: work(held)))
        passes += held
    for _ in range(20):
        for one in passes:
            assert one.resume() is not None
    for one in passes:
        one.close()
    assert max(most) == 1 and len(most) == 100


class Broken(RuntimeError):
    """What a model may raise."""


def test_an_error_in_a_pass_is_the_callers(model, batches, streams) -> None:
    def fail(module, args):
        raise Broken("no")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(Broken), forward_passes(model, batches, streams) as passes:
        for _ in streams:
            for one in passes:
                one.resume()
    handle.remove()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_of_the_caller_ends_all_passes(model, batches, streams, error) -> None:
    with pytest.raises(error), forward_passes(model, batches, streams) as passes:
        passes[0].resume()
        passes[0].resume()
        passes[1].resume()
        raise error


def test_an_interrupt_while_a_pass_runs(model, batches, streams) -> None:
    """The pass is in the middle of a layer when its caller is interrupted; it ends at its next pause."""
    import _thread

    def interrupt(module, args):
        if threading.current_thread() is not threading.main_thread():
            _thread.interrupt_main()
            threading.Event().wait(0.2)

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), forward_passes(model, batches, streams) as passes:
        passes[0].resume()
        passes[0].resume()
    handle.remove()


def test_closed_passes_hold_no_activations(model, batches, streams) -> None:
    keep = {s.projection: model.get_submodule(s.projection) for s in streams}
    with forward_passes(model, batches, streams, keep) as passes:
        at = passes[0].resume()
        held = [weakref.ref(at.value), weakref.ref(at.inputs)]
        del at
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_what_others_run_meanwhile_is_not_paused(model, batches, streams) -> None:
    with forward_passes(model, batches, streams) as passes:
        passes[0].resume()
        with torch.no_grad():
            assert torch.isfinite(model(**batches[1].inputs).logits).all()
        assert passes[0].resume().stream == streams[1]
