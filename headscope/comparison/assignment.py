"""The assignment problem: pairs of rows and columns whose costs have the least sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headscope.errors import InputError


def assign(cost: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pair each row with a column of its own, or each column with a row where there are fewer of them, at least cost.

    Shortest augmenting paths with dual variables (Jonker and Volgenant, 1987, "A Shortest Augmenting Path Algorithm for
    Dense and Sparse Linear Assignment Problems"), rectangular as in Crouse (2016, "On Implementing 2D Rectangular
    Assignment Algorithms"): rows enter one by one, each by the cheapest way of moving those that are in.

    Args:
        cost: (row, column), finite; either side may be empty.

    Returns:
        Rows, ascending, and their columns, as many as the shorter side has.

    Raises:
        InputError: `cost` has no two axes, or something in it is not finite.
    """
    costs: NDArray[np.float64] = np.asarray(cost, dtype=np.float64)
    if costs.ndim != 2 or not np.isfinite(costs).all():
        raise InputError("costs to assign by are not a matrix of finite numbers", "give finite numbers, one row a head")
    count, others = costs.shape
    if count > others:
        columns, rows = assign(costs.T)
        order = np.argsort(rows)
        return rows[order], columns[order]
    row_of, column_of = np.full(others, -1), np.full(count, -1)
    row_dual, column_dual = np.zeros(count), np.zeros(others)
    for row in range(count):
        _enter(costs, row, row_of, column_of, row_dual, column_dual)
    return np.arange(count), column_of


def _enter(
    cost: NDArray[np.float64],
    start: int,
    row_of: NDArray[np.int64],
    column_of: NDArray[np.int64],
    row_dual: NDArray[np.float64],
    column_dual: NDArray[np.float64],
) -> None:
    """Dijkstra from a row to the nearest free column, over reduced costs; what lies on the way moves on by one."""
    distance = np.full(len(row_of), np.inf)
    before = np.full(len(row_of), -1)
    done = np.zeros(len(row_of), dtype=bool)
    row, reached = start, 0.0
    while True:
        through = reached + cost[row] - row_dual[row] - column_dual
        nearer = ~done & (through < distance)
        distance[nearer], before[nearer] = through[nearer], row
        column = int(np.where(done, np.inf, distance).argmin())
        reached = float(distance[column])
        done[column] = True
        if row_of[column] < 0:
            break
        row = int(row_of[column])
    passed = done & (row_of >= 0)
    row_dual[start] += reached
    row_dual[row_of[passed]] += reached - distance[passed]
    column_dual[done] -= reached - distance[done]
    while column >= 0:
        row = int(before[column])
        row_of[column] = row
        column, column_of[row] = int(column_of[row]), column
