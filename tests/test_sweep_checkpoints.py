"""Models that are damaged, incomplete or made up: never measured on what is not in them, and never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.sweep import TEXT, Room, examples

Change = Callable[[Path], object]
QUERY = "encoder.layer.0.attention.self.query.weight"


def copied(room: Room, change: Change) -> str:
    """A damaged copy of the small BERT."""
    directory = room.root / "damaged"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(room.bert, directory)
    change(directory)
    return str(directory)


def raw(name: str, content: bytes) -> Change:
    return lambda d: (d / name).write_bytes(content)


def config(**changes: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def changed(directory: Path) -> None:
        path = directory / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file({k: v.contiguous() for k, v in found.items()}, path, metadata={"format": "pt"})

    return changed


def filled(name: str, value: float) -> Change:
    return weights(lambda w: [t.fill_(value) for k, t in w.items() if name in k])


def linked(name: str, target: str) -> Change:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to(target)

    return change


def pickled(content: Any) -> Change:
    def change(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        if isinstance(content, bytes):
            (directory / "pytorch_model.bin").write_bytes(content)
        else:
            torch.save(content, directory / "pytorch_model.bin")

    return change


class Trap:
    """Makes a directory as soon as it is unpickled."""

    place = ""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.place,)


BYTES = {
    "nothing": b"", "null": b"null", "a list": b"[]", "a number": b"3", "half an object": b"{", "an object": b"{}",
    "no text": b"\xff\xfe", "zeros": bytes(64), "deep nesting": b"[" * 50_000,
    "a long number": b'{"hidden_size":' + b"9" * 5000 + b"}",
}  # fmt: skip
DAMAGED: dict[str, Change] = {
    **{f"config.json is {what}": raw("config.json", content) for what, content in BYTES.items()},
    **{f"weights are {what}": raw("model.safetensors", content) for what, content in BYTES.items()},
    **{f"the pickle is {what}": pickled(content) for what, content in BYTES.items()},
    "the pickle is a list": pickled([1, 2]),
    "the pickle has numbers": pickled({"a": 3}),
    **{
        f"{name} is {what}": linked(name, target)
        for name in ("config.json", "model.safetensors")
        for what, target in {"a loop": name, "a null device": os.devnull, "unreadable": "/proc/self/mem"}.items()
    },
    "a huge header": raw("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
    "no model type": config(model_type=None),
    "a list as model type": config(model_type=["bert"]),
    "a path as model type": config(model_type="../bert"),
    **{
        f"{key} is {value!r}": config(**{key: value})
        for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "intermediate_size")
        for value in ("x", -1, 10**30, [], {})
    },
    "heads that do not divide": config(num_attention_heads=3),
    "no heads": config(num_attention_heads=0),
    "an activation that is none": config(hidden_act="x"),
    "pruned by nobody": config(headscope={"heads": 3}),
    "version 4 with nonsense": config(pruned_heads={"0": "x"}),
    "version 4 with a layer too many": config(pruned_heads={"9": [0]}),
    "NaN queries": filled(QUERY, torch.nan),
    "infinite queries": filled(QUERY, torch.inf),
    "NaN embeddings": filled("word_embeddings", torch.nan),
    "NaN norms": filled("LayerNorm", torch.nan),
    "a missing weight": weights(lambda w: w.pop(QUERY)),
    "another shape": weights(lambda w: w.update({QUERY: w[QUERY][:-1]})),
    "no rows": weights(lambda w: w.update({QUERY: w[QUERY][:0]})),
    "another rank": weights(lambda w: w.update({QUERY: w[QUERY][None]})),
}
TOKENIZERS: dict[str, Change] = {
    **{f"tokenizer.json is {what}": raw("tokenizer.json", content) for what, content in BYTES.items()},
    "tokenizer.json is a dead link": linked("tokenizer.json", "no"),
    "tokenizer.json is unreadable": linked("tokenizer.json", "/proc/self/mem"),
}
RANDOM = 60


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_models_are_refused(kind: str, room: Room) -> None:
    room.refused("analyze", "-m", copied(room, DAMAGED[kind]), TEXT, codes=(3,))


@pytest.mark.parametrize("kind", DAMAGED)
def test_no_command_makes_anything_of_them(kind: str, room: Room) -> None:
    """Configurations that are whole may be counted, and the weights may not matter to what is asked."""
    path = copied(room, DAMAGED[kind])
    assert room.judged("size", path, "-f", "json").code in (0, 3)
    room.refused("convert", path, "-o", room.out("c"), codes=(2, 3))
    room.refused("compare", room.bert, path, TEXT, codes=(3,))
    room.refused("prune", "-m", path, "--heads", "0:0", "--no-latency", "-o", room.out("p"), codes=(1, 3))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_damaged_tokenizers_are_refused_where_they_are_needed(kind: str, room: Room) -> None:
    path = copied(room, TOKENIZERS[kind])
    room.refused("analyze", "-m", path, TEXT, codes=(2, 3))
    room.refused("analyze", "-m", room.bert, "--tokenizer", path, TEXT, codes=(2, 3))
    assert room.judged("analyze", "-m", path, "--ids", "2 5 3", "-f", "json").code == 0


def test_a_pickle_that_would_run_code_does_not(room: Room) -> None:
    Trap.place = room.out("sprung")
    path = copied(room, pickled({QUERY: Trap()}))
    for line in (("analyze", "-m", path, TEXT), ("verify", "-m", room.bert, "--checkpoint", path), ("size", path)):
        room.judged(*line)
    assert not Path(Trap.place).exists()


SIZE = 20_000


@examples(RANDOM)
@given(at=st.integers(0, SIZE), new=st.binary(min_size=1, max_size=16), cut=st.booleans())
def test_any_damage_to_weights_keeps_to_the_contract(at: int, new: bytes, cut: bool, room: Room) -> None:
    whole = Path(room.bert, "model.safetensors").read_bytes()
    changed = whole[:at] + new + (b"" if cut else whole[at + len(new) :])
    outcome = room.judged(
        "analyze", "-m", copied(room, raw("model.safetensors", changed)), "--ids", "2 5 3", "-f", "json"
    )
    assert outcome.code == 3 if cut else outcome.code in (0, 3)


KEYS = (
    "architectures", "auto_map", "bos_token_id", "dtype", "headscope", "hidden_act", "hidden_size", "id2label",
    "is_decoder",
    "layer_norm_eps", "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers",
    "pad_token_id",
    "pruned_heads", "quantization_config", "tie_word_embeddings", "type_vocab_size", "use_cache", "vocab_size",
)  # fmt: skip
VALUES = st.none() | st.booleans() | st.integers(-3, 100) | st.floats() | st.text(max_size=4) | st.sampled_from(
    [10**12, 10**30, [], [1], {}, {"a": 1}, {"0": [0]}, "float99", "bert", ["BertModel"], ["Nope"]]
)  # fmt: skip


@examples(RANDOM)
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_in_a_configuration_keeps_to_the_contract(key: str, value: Any, room: Room) -> None:
    path = copied(room, config(**{key: value}))
    assert room.judged("size", path, "-f", "json").code in (0, 3)
    assert room.judged("analyze", "-m", path, "--ids", "2 5 3", "-f", "json").code in (0, 2, 3)


CASES = 5 * len(DAMAGED) + 3 * len(TOKENIZERS) + 3 + 3 * RANDOM
