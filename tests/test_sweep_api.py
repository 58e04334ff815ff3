"""Arguments of the Python functions that make no sense: refused by name, never an error from inside of a library."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headscope
from headscope.errors import HeadscopeError, InputError, ModelError
from tests.sweep import TEXT, Room

OWN = (str(Path(headscope.__file__).parent), __file__)
# Nothing that anything could be made of, and what looks like it.
ODD: dict[str, Any] = {
    "an object": object(),
    "a complex number": 1j,
    "a list of lists": [[[]]],
    "no number": float("nan"),
    "a huge number": 10**30,
    "a negative number": -1,
    "a fraction": 1.5,
    "bytes": b"x",
    "nothing": "",
    "a null": "\0",
    "half a character": "\ud800",
    "a mapping": {"a": 1},
    "an array": np.zeros((2, 2)),
    "an array of names": np.array(["x"]),
    "a tensor": torch.ones(2, 3),
    "a class": int,
}

_Calls = dict[str, tuple[Callable[..., Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def calls(room: Room) -> _Calls:
    """Functions with arguments that work."""
    bert, llama = headscope.load(room.bert), headscope.load(room.llama, own_class=True)
    analysis = headscope.analyze(bert, TEXT, maps=True)
    texts = Path(room.texts).read_text().splitlines()
    return {
        "analyze": (headscope.analyze, {"model": bert, "texts": TEXT}),
        "compare": (headscope.compare, {"a": bert, "b": bert, "texts": TEXT}),
        "extract_attention_patterns": (headscope.extract_attention_patterns, {"text": TEXT, "model_name": bert}),
        "analyze_head_patterns": (headscope.analyze_head_patterns, {"weights": np.full((2, 3, 3), 1 / 3)}),
        "head_importance": (headscope.head_importance, {"model": llama, "data": texts, "tokens": 40}),
        "heatmap": (headscope.heatmap, {"analysis": analysis, "kind": "heads", "layer": 0, "head": 0, "dpi": 20}),
        "prune": (headscope.prune, {"model": llama, "heads": "0:0-1", "latency": False}),
        "report": (headscope.report, {"analysis": analysis}),
        "size": (headscope.size, {"hidden_size": 64, "num_heads": 4, "num_layers": 2}),
        "verify": (headscope.verify, {"model": bert, "text": TEXT}),
    }


ARGUMENTS = {
    "analyze": ("model", "texts", "tokenizer", "layer", "head", "stack", "rules", "metrics", "engine", "types",
    "conllu", "ids",
                "decoder_texts", "images", "audio", "inputs", "generate", "pairs", "max_length", "batch_size", "maps",
                "seed"),
    "compare": ("a", "b", "texts", "data", "sample", "ids", "layer", "head", "stack", "rules", "metrics", "engine",
    "max_length",
                "batch_size", "max_rows", "seed"),
    "extract_attention_patterns": ("text", "model_name", "layer"),
    "analyze_head_patterns": ("weights", "tokens", "rules"),
    "head_importance": ("model", "data", "method", "replace", "units", "layer", "head", "stack", "max_length",
    "batch_size",
                        "tokens", "seed"),
    "heatmap": ("analysis", "kind", "layer", "head", "stack", "metric", "query", "file_format", "dpi", "cmap", "vmax"),
    "prune": ("model", "heads", "scores", "method", "data", "drop", "until_drop", "unit", "min_per_layer", "steps",
    "max_length",
              "batch_size", "save_as", "ragged", "eval", "latency", "seed"),
    "report": ("analysis", "importance", "curve"),
    "size": ("models", "hidden_size", "num_heads", "num_layers", "num_kv_heads", "head_dim", "intermediate_size",
    "vocab_size",
             "length", "dtype", "batch_size"),
    "verify": ("model", "text", "checkpoint", "backend", "layer", "stack", "seed"),
}  # fmt: skip
PLACES = tuple((name, argument) for name, arguments in ARGUMENTS.items() for argument in arguments)


def complaint(call: Callable[[], Any]) -> str | None:
    """What is wrong with the error of a call that may fail; None where it went well or said clearly what it lacks."""
    try:
        call()
    except HeadscopeError as error:
        return None if error.message and error.hint else f"no message or no hint: {error!r}"
    except (TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return None if last.filename.startswith(OWN) else f"{error!r} from {last.filename}:{last.lineno}"
    except Exception as error:  # whatever it is, it is none of the kinds that callers are told of
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{error!r} from {last.filename}:{last.lineno}"
    return None


@pytest.mark.parametrize(("name", "argument"), PLACES)
def test_odd_arguments_are_refused_by_name(name: str, argument: str, calls: _Calls) -> None:
    function, arguments = calls[name]
    found = {what: complaint(lambda: function(**arguments | {argument: odd})) for what, odd in ODD.items()}  # noqa: B023
    assert not {what: said for what, said in found.items() if said is not None}


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda r: headscope.analyze(r.bert), InputError, "no input"),
        (lambda r: headscope.analyze(r.bert, []), InputError, "empty"),
        (lambda r: headscope.analyze(r.bert, TEXT, layer=7), InputError, "layer 7 does not exist"),
        (lambda r: headscope.analyze(r.bert, TEXT, max_length=1.5), InputError, "max_length is 1.5"),
        (lambda r: headscope.analyze(r.bert, TEXT, seed=-1), InputError, "seed is -1"),
        (lambda r: headscope.analyze(r.bert, ids=[[400]]), InputError, "400 does not exist"),
        (lambda r: headscope.analyze("a" * 5000, TEXT), ModelError, "no model at"),
        (lambda r: headscope.analyze("~nobody-of-that-name/x", TEXT), ModelError, "no model at"),
        (lambda r: headscope.prune(r.llama), InputError, "what goes is said by"),
        (lambda r: headscope.prune(r.llama, method="random", drop="x"), InputError, "drop is 'x'"),
        (lambda r: headscope.size(hidden_size="x"), InputError, "hidden_size is 'x'"),
        (lambda r: headscope.MultiHeadAttention(8, 3), ValueError, "not a multiple"),
        (lambda r: headscope.MultiHeadAttention(8, 0), ValueError, "num_heads must be 1 or more, got 0"),
        (lambda r: headscope.MultiHeadAttention(8, 2).forward(np.zeros((3, 7))), ValueError, r"must have shape"),
        (lambda r: headscope.MultiHeadAttention(8.0, 2), TypeError, "d_model must be a whole number"),
        (
            lambda r: headscope.MultiHeadAttention(8, 2).forward(np.zeros((2, 3, 8)), context=np.zeros((5, 3, 8))),
            ValueError,
            "batches differ",
        ),
        (lambda r: headscope.MultiHeadAttentionTorch(8, 3), ValueError, "not a multiple"),
        (lambda r: headscope.MultiHeadAttentionTorch(8, 2)(np.zeros((3, 8))), TypeError, "x must be a torch tensor"),
        (lambda r: headscope.MultiHeadAttentionTorch(8, 2)(torch.zeros(3, 8).double()), ValueError, "dtypes differ"),
        (
            lambda r: headscope.efficient_mha(torch.zeros(2, 1, 3, 4), *[torch.zeros(5, 1, 3, 4)] * 2),
            ValueError,
            "batches differ",
        ),
    ],
)  # fmt: skip
def test_what_errors_say(call: Callable[[Room], Any], kind: type[Exception], said: str, room: Room) -> None:
    with pytest.raises(kind, match=said):
        call(room)


CASES = len(PLACES) * len(ODD) + 20
