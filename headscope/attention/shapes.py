"""Shape checks that the NumPy and the torch version share. Messages name the operation, the argument and the shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from numbers import Integral
from typing import Any


def check_attention_shapes(operation: str, query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> None:
    """Check the shapes that go into attention.

    Args:
        operation: Name of the calling function, for the message.
        query: Shape (…, heads, n_q, d_k).
        key: Shape (…, kv_heads, n_k, d_k).
        value: Shape (…, kv_heads, n_k, d_v).

    Raises:
        ValueError: An axis is missing, widths, lengths or batches differ, or the heads cannot be shared out evenly.
    """
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) < 3:
            raise ValueError(f"{operation}: {name} needs axes (…, heads, length, width), got shape {tuple(shape)}")
    check_batch(operation, {"query": query[:-3], "key": key[:-3], "value": value[:-3]})
    if query[-1] != key[-1]:
        raise ValueError(f"{operation}: query and key differ in width: {tuple(query)} and {tuple(key)}")
    if key[-3:-1] != value[-3:-1]:
        raise ValueError(f"{operation}: key and value differ in heads or length: {tuple(key)} and {tuple(value)}")
    check_head_groups(operation, query[-3], key[-3])


def check_head_groups(operation: str, num_heads: int, num_kv_heads: int) -> None:
    """Check that `num_heads` query heads share `num_kv_heads` key-value heads evenly.

    Raises:
        ValueError: `num_heads` is not a multiple of `num_kv_heads`.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{operation}: {num_heads} query heads cannot share {num_kv_heads} key-value heads evenly")


def check_sizes(operation: str, sizes: Mapping[str, Any]) -> None:
    """Check that sizes are whole numbers from 1 up; None passes.

    Raises:
        TypeError: One is no whole number.
        ValueError: One is less than 1.
    """
    for name, size in sizes.items():
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise TypeError(f"{operation}: {name} must be a whole number, got {size!r}")
        if int(size) < 1:
            raise ValueError(f"{operation}: {name} must be 1 or more, got {size}")


def check_batch(operation: str, batches: Mapping[str, Sequence[int]]) -> None:
    """Check that the batch axes of several arrays go together: each is the same size in all of them, or 1.

    Raises:
        ValueError: They do not.
    """
    for sizes in zip_longest(*(reversed(axes) for axes in batches.values()), fillvalue=1):
        if len(set(sizes) - {1}) > 1:
            said = " and ".join(f"{name} {tuple(axes)}" for name, axes in batches.items())
            raise ValueError(f"{operation}: the batches differ: {said}")


def check_shape(operation: str, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Check one array's exact shape.

    Raises:
        ValueError: `shape` is not `expected`.
    """
    if tuple(shape) != tuple(expected):
        raise ValueError(f"{operation}: {name} must have shape {tuple(expected)}, got {tuple(shape)}")


def check_width(operation: str, name: str, shape: Sequence[int], width: int) -> None:
    """Check that an array is a list of vectors of one width, (…, n, width).

    Raises:
        ValueError: It has fewer than two axes, or its last is not `width`.
    """
    if len(shape) < 2 or shape[-1] != width:
        raise ValueError(f"{operation}: {name} must have shape (…, n, {width}), got {tuple(shape)}")


def check_broadcast(operation: str, name: str, shape: Sequence[int], scores: Sequence[int]) -> None:
    """Check that a mask or bias broadcasts to the scores without adding axes to them.

    Raises:
        ValueError: It has more axes than the scores, or an axis that is neither 1 nor the scores' size.
    """
    fits = len(shape) <= len(scores) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(scores), strict=False)
    )
    if not fits:
        raise ValueError(f"{operation}: {name} of shape {tuple(shape)} does not broadcast to scores {tuple(scores)}")


def mask_position_for_heads(operation: str, mask_ndim: int, x_ndim: int) -> bool:
    """Say whether a mask given beside inputs (…, n, d_model) lacks the head axis that scores have.

    A mask may be (n_q, n_k), the inputs' batch axes with (n_q, n_k), or the same with a head axis before n_q.

    Raises:
        ValueError: The mask has another number of axes.
    """
    if mask_ndim == x_ndim:
        return True
    if mask_ndim in (2, x_ndim + 1):
        return False
    raise ValueError(
        f"{operation}: mask needs 2 axes (n_q, n_k), {x_ndim} with the batch, or {x_ndim + 1} with batch and heads; "
        f"got {mask_ndim}"
    )
