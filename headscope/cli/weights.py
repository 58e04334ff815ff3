"""`--weights FILE.npz`: attention matrices and their tokens for other programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headscope.cli.output import replacing
from headscope.errors import InputError
from headscope.results import Analysis


def write_weights(analysis: Analysis, path: Path, force: bool) -> None:
    """Write the matrices of `analysis.maps` as an uncompressed `.npz` without pickles.

    `STACK.LAYER` is float32, (heads, query, key). Beside it stand `heads.STACK.LAYER`, the heads' numbers, and
    `queries.STACK.LAYER` and `keys.STACK.LAYER`, their tokens; `tokens` are the first text's.

    Raises:
        InputError: The analysis kept no matrices, or the file exists or cannot be written.
    """
    if not analysis.maps:
        raise InputError("this input leaves no attention matrices to write", "leave out --weights")
    arrays = {"tokens": np.array(analysis.inputs.first_tokens, dtype=np.str_)}
    for one in analysis.maps:
        name = f"{one.stack}.{one.layer}"
        arrays[name] = one.weights.astype(np.float32, copy=False)
        arrays[f"heads.{name}"] = np.array(one.heads, dtype=np.int64)
        arrays[f"queries.{name}"] = np.array(one.queries, dtype=np.str_)
        arrays[f"keys.{name}"] = np.array(one.keys, dtype=np.str_)
    with replacing(path, force) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # allow_pickle, which the oldest NumPy would write as an array
