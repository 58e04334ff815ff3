"""Each text's values, a row a text and head, and the Parquet file that they go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.corpus.job import Job
from headscope.corpus.part import Table
from headscope.heads.layer_facts import LayerFacts
from headscope.heads.statistics import Layer, Values
from headscope.reading import Record


def table_of(
    records: Sequence[Record],
    tokens: Sequence[int],
    values: Mapping[Layer, Mapping[str, Values]],
    facts: Mapping[Layer, LayerFacts],
    job: Job,
) -> Table:
    """The chosen heads' values on each text; NaN where a text could not show one.

    Returns:
        Columns `text` (the number in the corpus, from 0), `where`, `tokens`, `stack`, `layer`, `head`, `pattern` (the
        label by this text alone), and a column a metric; texts in the corpus' order, then heads.
    """
    labels = np.array(job.rules.labels)
    layers: list[dict[str, NDArray[Any]]] = []
    for key, fact in facts.items():
        heads = job.head.within(fact.heads)
        places = [fact.heads.index(head) for head in heads]
        shape = (len(records), len(heads))
        found = {name: v.value[:, places] for name, v in values[key].items()}
        layers.append(
            {
                "text": _rows([r.number for r in records], shape),
                "where": _rows([r.where for r in records], shape),
                "tokens": _rows(list(tokens), shape),
                "stack": np.full(shape, fact.stack),
                "layer": np.full(shape, fact.layer),
                "head": np.broadcast_to(np.array(heads, dtype=np.int64), shape),
                "pattern": labels[job.rules.label_many(found)],
                **{name: found.get(name, np.full(shape, np.nan)) for name in job.shown},
            }
        )
    # (texts, heads of all layers), so that a text's rows follow each other.
    return {name: np.concatenate([layer[name] for layer in layers], axis=1).ravel() for name in layers[0]}


def _rows(values: Sequence[Any], shape: tuple[int, int]) -> NDArray[Any]:
    return np.broadcast_to(np.array(values)[:, None], shape)
