"""Scores that are means over texts, and what every method on texts checks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from headscope.capture.outputs import Output
from headscope.errors import InputError, ModelError
from headscope.importance.method import LayerScores, Task
from headscope.importance.texts import Data


def averaged(values: NDArray[np.float64], normalise: bool = False) -> LayerScores:
    """Means over texts and their standard errors, NaN for a single text.

    Args:
        values: float64, (texts, units).
        normalise: Divide both by the L2 norm of the means, where it is not zero.
    """
    texts = len(values)
    scores = values.mean(axis=0)
    errors = values.std(axis=0, ddof=1) / np.sqrt(texts) if texts > 1 else np.full_like(scores, np.nan)
    norm = float(np.linalg.norm(scores)) if normalise else 1.0
    return LayerScores(scores / (norm or 1.0), errors / (norm or 1.0))


def texts_of(task: Task) -> Data:
    """The texts of a task.

    Raises:
        InputError: It has none.
    """
    if task.data is None:
        raise InputError("this method scores heads on texts, and there are none", "Give --data FILE.")
    return task.data


def check_ran(outputs: Sequence[Output], ran: Collection[Output]) -> None:
    """Refuse modules that the texts do not reach: nothing can be said of their heads.

    Raises:
        ModelError: There is one; the message names it.
    """
    for output in outputs:
        if output not in ran:
            raise ModelError(
                f"{output.sites[0].path} computes nothing on these texts", "Score the stacks that read them: --stack."
            )
