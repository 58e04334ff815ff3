"""Parts as files: numbers in a NumPy archive, the rest as JSON in it. Nothing in such a file can run code."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.corpus.part import Part
from headscope.corpus.summary import Summary
from headscope.heads.catalogue.layer_types import LayerTypes
from headscope.heads.layer_facts import LayerFacts
from headscope.heads.sums import LayerSums
from headscope.results import ModelInfo, Stack

_META, _TABLE, _TYPES = "meta", "table", "types"
_PLAIN = ("first", "texts", "tokens", "truncated", "longest", "limit", "unknown", "known", "skipped", "first_text")
_TUPLES = ("first_tokens", "engines", "warnings")


def to_bytes(part: Part) -> bytes:
    """A `.npz` archive."""
    summary = part.summary
    arrays: dict[str, NDArray[Any]] = {}
    for place, sums in enumerate(summary.sums.values()):
        arrays |= {f"{place}/{name}": array for name, array in sums.to_arrays().items()}
    for place, types in enumerate(summary.types.values()):
        arrays |= {f"{_TYPES}{place}/{name}": array for name, array in types.to_arrays().items()}
    if part.table is not None:
        arrays |= {f"{_TABLE}/{name}": np.asarray(column) for name, column in part.table.items()}
    meta = {
        "number": part.number,
        "digest": part.digest,
        "table": part.table is not None,
        "summary": {name: getattr(summary, name) for name in (*_PLAIN, *_TUPLES, "named")},
        "model": None if summary.model is None else asdict(summary.model),
        "facts": [asdict(fact) for fact in summary.facts.values()],
        "sums": [list(layer) for layer in summary.sums],
        "types": [list(layer) for layer in summary.types],
    }
    arrays[_META] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    out = io.BytesIO()
    # Compressed, since the rows of texts repeat their places.
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]  # allow_pickle, which the oldest NumPy would write as an array
    return out.getvalue()


def from_bytes(data: bytes) -> Part:
    """What `to_bytes` was given.

    Raises:
        ValueError, KeyError, OSError, zipfile.BadZipFile: It is no such archive.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(arrays.pop(_META).tobytes())
    groups: dict[str, dict[str, NDArray[Any]]] = {}
    for name, array in arrays.items():
        group, _, rest = name.partition("/")
        groups.setdefault(group, {})[rest] = array
    sums = {(stack, layer): LayerSums.from_arrays(groups[str(i)]) for i, (stack, layer) in enumerate(meta["sums"])}
    types = {
        (stack, layer): LayerTypes.from_arrays(groups[f"{_TYPES}{i}"]) for i, (stack, layer) in enumerate(meta["types"])
    }
    facts = [LayerFacts(**_tuples(fact)) for fact in meta["facts"]]
    found = _tuples(meta["summary"])
    summary = Summary(
        **{name: found[name] for name in (*_PLAIN, *_TUPLES)},
        named=tuple((where, reason) for where, reason in found["named"]),
        model=None if meta["model"] is None else _model(meta["model"]),
        facts={(fact.stack, fact.layer): fact for fact in facts},
        sums=sums,
        types=types,
    )
    return Part(meta["number"], meta["digest"], summary, groups.get(_TABLE, {}) if meta["table"] else None)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _model(fields: dict[str, Any]) -> ModelInfo:
    stacks = tuple(Stack(s["name"], tuple(s["layers"]), tuple(s["num_heads"])) for s in fields.pop("stacks"))
    return ModelInfo(**fields, stacks=stacks)
