"""Analyses made by hand for the tests of the report, harmless and hostile, and a reader of pages."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np

from headscope.heads.catalogue.result import Catalogue, Example, Looked, TypeInfo, TypeRecord
from headscope.results import Analysis, AttentionMap, Spread
from tests.views_samples import TOKENS, analysis, causal_map, model_heads

EVIL = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    "\"'><svg onload=alert(4)>",
    "<!--<script>",
    "]]>--!>\u2028\u2029alert(5)",
    "$$\\href{javascript:alert(6)}{x}$$",
    "@weight{safe} ${model}",
    "javascript:alert(7)",
    "</style><style>*{display:none}",
)


def small(layers: int = 2, heads: int = 4, **changes: Any) -> Analysis:
    """A small model's analysis with the matrices of every head."""
    maps = tuple(causal_map(layer, heads, TOKENS, seed=layer) for layer in range(layers))
    return replace(analysis(model_heads(layers, heads), maps=maps), **changes)


def over_texts() -> Analysis:
    """The same over 30 texts, with spread and stability."""
    found = small()
    heads = []
    for number, record in enumerate(found.heads):
        spread = {
            name: Spread(0.05 + number / 100, value - 0.02, value + 0.03, 30)
            for name, value in record.metrics.items()
            if value is not None
        }
        heads.append(replace(record, spread=spread, stability=0.5 if number % 3 == 0 else 1.0))
    return replace(found, heads=tuple(heads), inputs=replace(found.inputs, texts=30))


def with_types(found: Analysis, name: str = "previous_token", text: str = "the cat sat") -> Analysis:
    """With a type of the catalogue that every second head has."""
    example = Example(text, 2, text, (Looked(1, text, 0.75),))
    record = TypeRecord(name, 0.8125, 0.125, 12, 0.7, 0.9, example, criteria=(name,), alternative=(name, 0.25), p=0.003)
    heads = tuple(replace(h, types=(record,) if i % 2 else ()) for i, h in enumerate(found.heads))
    kind = TypeInfo(name, text, text, len(heads), len(heads) // 2, 1.5, None)
    scores = {name: tuple(i / len(heads) for i in range(len(heads)))}
    return replace(found, heads=heads, catalogue=Catalogue((kind,), scores, {}, {}))


def hostile() -> Analysis:
    """Every text that a page shows is one of `EVIL`: names, tokens, labels, metrics, stacks, types, warnings."""
    n = len(EVIL)
    weights = np.tril(np.ones((2, n, n), dtype=np.float32))
    weights /= weights.sum(-1, keepdims=True)
    stack = EVIL[0]
    heads = tuple(
        replace(
            h,
            pattern=EVIL[i],
            runner_up=EVIL[i + 2],
            rest_pattern=EVIL[i + 1],
            metrics={EVIL[1]: 0.5, EVIL[2]: 0.25 * i},
            chance={EVIL[1]: 0.1, EVIL[2]: None},
            at_chance=(EVIL[2],),
            second=EVIL[3],
            stability=0.5,
            second_share=0.5,
        )
        for i, h in enumerate(model_heads(1, 2, stack=stack))
    )
    found = analysis(
        heads,
        name=EVIL[1],
        tokens=EVIL,
        warnings=EVIL,
        maps=(AttentionMap(stack, 0, (0, 1), weights, EVIL, EVIL),),
    )
    return with_types(replace(found, versions=dict.fromkeys(EVIL, EVIL[2])), EVIL[1], " ".join(EVIL))


class Page(HTMLParser):
    """What a browser's parser finds: elements with their attributes, scripts, the embedded data, text by element."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._raw: dict[str, str | None] | None = None
        self._embedded = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._raw = dict(attrs) if tag == "script" else None
        if tag == "script" and self._raw.get("type") is None:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._raw = None

    def handle_data(self, data: str) -> None:
        if self._raw is None:
            self.text.append(data)
        elif self._raw.get("type") == "application/json":
            self._embedded += data
        else:
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        """The object that the page's script reads."""
        return json.loads(self._embedded)

    @property
    def policy(self) -> str:
        """The Content-Security-Policy."""
        metas = [attributes for tag, attributes in self.elements if tag == "meta"]
        return next(str(a["content"]) for a in metas if a.get("http-equiv") == "Content-Security-Policy")
