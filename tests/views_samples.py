"""Analyses made by hand for the views' tests: labels, numbers and names are whatever a test needs, no model is run."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headscope.results import (
    Analysis,
    AttentionMap,
    HeadRecord,
    InputInfo,
    ModelInfo,
    RuleInfo,
    Spread,
    Stack,
)

SEED = {"sink": 0.4, "prev_token": 0.3, "self_attend": 0.4, "entropy": 0.5}
LABELS = ("attention_sink", "prev_token", "self_attend", "focused", "broad", "next_token", "unmeasurable")
TOKENS = ("[CLS]", "the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired", ".", "[SEP]")
HOSTILE = (
    *("$x_1$", "[red]", "=1+1", "a\nb", "\x1b[31m", "\u202egnp.exe", "|", "<b>"),
    *("猫", "🙂", "\ud800", "", " ", "\\"),
)


def record(
    layer: int,
    head: int,
    pattern: str = "broad",
    *,
    stack: str = "self",
    metrics: Mapping[str, float | None] | None = None,
    kv_head: int | None = None,
    runner_up: str | None = None,
    rest_pattern: str | None = None,
    at_chance: tuple[str, ...] = (),
    spread: Mapping[str, Spread] | None = None,
) -> HeadRecord:
    """One head; its metrics are drawn from its numbers unless given."""
    if metrics is None:
        draw = np.random.default_rng((layer, head, len(stack)))
        metrics = dict(zip(SEED, [*draw.random(3), 3 * draw.random()], strict=True))
    return HeadRecord(
        stack=stack,
        layer=layer,
        head=head,
        kv_head=head if kv_head is None else kv_head,
        pattern=pattern,
        runner_up=runner_up,
        metrics=metrics,
        chance=dict.fromkeys(metrics, 0.0769),
        at_chance=at_chance,
        rest_pattern=rest_pattern,
        spread=spread,
    )


def analysis(
    heads: Sequence[HeadRecord],
    *,
    name: str = "sentence-transformers/all-MiniLM-L6-v2",
    stacks: Sequence[Stack] | None = None,
    tokens: Sequence[str] = TOKENS,
    texts: int = 1,
    warnings: tuple[str, ...] = (),
    maps: tuple[AttentionMap, ...] = (),
    num_kv_heads: int | None = None,
) -> Analysis:
    """An analysis of `heads`, of a model that has just these unless `stacks` says otherwise."""
    found = tuple(stacks) if stacks is not None else stacks_of(heads)
    counts = {n for stack in found for n in stack.num_heads}
    num_heads = counts.pop() if len(counts) == 1 else None
    return Analysis(
        model=ModelInfo(
            name=name,
            type="bert",
            class_name="BertModel",
            dtype="float32",
            device="cpu",
            num_layers=len(found[0].layers) if len(found) == 1 else None,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads or num_heads,
            head_dim=32,
            hidden_size=384,
            stacks=found,
        ),
        engine="layerwise",
        rules=RuleInfo("seed", SEED),
        inputs=InputInfo(texts, texts * len(tokens), 0, tuple(tokens)),
        heads=tuple(heads),
        versions={"headscope": "0.1.0"},
        warnings=warnings,
        maps=maps,
    )


def stacks_of(heads: Sequence[HeadRecord]) -> tuple[Stack, ...]:
    """The stacks that just these heads would make."""
    counts: dict[str, dict[int, int]] = {}
    for h in heads:
        layers = counts.setdefault(h.stack, {})
        layers[h.layer] = layers.get(h.layer, 0) + 1
    return tuple(Stack(name, tuple(layers), tuple(layers.values())) for name, layers in counts.items())


def model_heads(layers: int, heads: int, stack: str = "self", sinks: bool = True) -> list[HeadRecord]:
    """A whole stack; labels go round, and every sink says something of its rest."""
    made = []
    for layer in range(layers):
        for head in range(heads):
            pattern = LABELS[(3 * layer + 5 * head + layer * head) % 5]
            rest = LABELS[1 + (layer + head) % 4] if sinks and pattern == "attention_sink" else None
            marks = ("sink",) if (layer + head) % 4 == 0 else ()
            runner_up = "broad" if head % 2 else None
            made.append(
                record(layer, head, pattern, stack=stack, rest_pattern=rest, at_chance=marks, runner_up=runner_up)
            )
    return made


def rows_to_one(weights: NDArray[np.float64]) -> NDArray[np.float32]:
    """`weights` (..., query, key) with every row divided by its sum."""
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def causal_map(layer: int, heads: int, tokens: Sequence[str], stack: str = "self", seed: int = 0) -> AttentionMap:
    """Causal weights (heads, n, n): a sink, a previous-token head, a diagonal, a uniform one, then mixtures."""
    n = len(tokens)
    rng = np.random.default_rng(seed)
    first, previous, same = np.zeros((n, n)), np.eye(n, k=-1), np.eye(n)
    first[:, 0] = 1
    previous[0, 0] = 1
    uniform = np.tril(np.ones((n, n)))
    uniform /= uniform.sum(-1, keepdims=True)
    kinds = np.stack([first, previous, same, uniform])
    mixes = np.concatenate([np.eye(4), rng.dirichlet(np.full(4, 0.3), size=max(heads - 4, 0))])[:heads]
    noise = np.tril(rng.gamma(0.3, size=(heads, n, n))) * 0.05 / np.sqrt(n)
    weights = np.einsum("hk,kij->hij", mixes, kinds) + noise
    return AttentionMap(stack, layer, tuple(range(heads)), rows_to_one(weights), tuple(tokens), tuple(tokens))


# The machines that run the tests may be busy: no example has a deadline.
FEW = settings(max_examples=40, deadline=None)

_TROUBLE = (*HOSTILE, *"=+-@\t\r|`*_>&'\"#!~", "\u200b", "\u2066", "\u0301", "</td>", "[/]", "\\|", "](x)")
_ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=4)


def hostile_text() -> st.SearchStrategy[str]:
    """Text of any characters at all, lone surrogates too, with a preference for those that break things."""
    trouble = st.lists(st.sampled_from(_TROUBLE), max_size=3).map("".join)
    return st.tuples(_ANY_TEXT, trouble, _ANY_TEXT).map("".join)


@st.composite
def hostile_analyses(draw: st.DrawFn) -> Analysis:
    """One to four heads with hostile names, labels, tokens and warnings, and numbers that need not be there."""
    model, stack, *texts = draw(st.lists(hostile_text(), min_size=5, max_size=5))
    choose = random.Random(draw(st.integers(0, 2**32)))
    names = choose.sample([*SEED, "special", "sink_rest"], choose.randint(1, 6))
    numbers = (None, 0.0, 1.0, -2.5, 1e-300, 1e6, 0.1 + 0.2, choose.random())
    heads = [
        record(
            3,
            head,
            choose.choice([*texts, "broad"]),
            stack=stack,
            metrics={name: choose.choice(numbers) for name in names},
            runner_up=choose.choice([None, *texts]),
            rest_pattern=choose.choice([None, *texts]),
            at_chance=tuple(choose.sample(names, choose.randint(0, len(names)))),
            spread=choose.choice([None, {names[0]: Spread(0.1, 0.2, 0.4, 5)}]),
        )
        for head in range(choose.randint(1, 4))
    ]
    return analysis(heads, name=model, tokens=texts, warnings=tuple(texts[:2]))
