"""What the views show of the sample catalogue, written down apart from them, and how it is read back."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType

from headscope.results import Analysis
from tests.catalogue_samples import (
    COREFERENCE,
    INFOS,
    RELATIONS,
)


def lines_at(renderable: RenderableType, width: int, encoding: str = "utf-8", **environment: str) -> list[str]:
    """What a console of this width prints, line by line."""
    raw = io.BytesIO()
    color = bool(environment)
    system: Any = "truecolor" if color else None
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Console(
        file=stream, width=width, force_terminal=color, color_system=system, _environ=environment, legacy_windows=False
    ).print(renderable)
    stream.flush()
    return raw.getvalue().decode(encoding).split("\n")


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def parts_of(lines: Sequence[str], titles: Sequence[str]) -> dict[str, list[str]]:
    """The lines under each title."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if line in titles:
            found[line] = []
        elif found:
            found[list(found)[-1]].append(line)
    return found


def columns_of(lines: Sequence[str]) -> Iterator[str]:
    """Every column of every block, from top to bottom without blanks; a rule says where columns stand."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        blocks = [*blocks, []] if not line.strip() else [*blocks[:-1], [*blocks[-1], line]]
    for number, block in enumerate(b for b in blocks if b):
        rule = next(line for line in block if set(line.strip()) <= {"─", "-", " "} and len(line.split()[0]) > 1)
        for place, found in enumerate(re.finditer(r"[─-]+", rule)):
            if number == 0 or place > 0:
                yield squeezed("".join(line[found.start() : found.end()] for line in block if line is not rule))


def check(lines: Sequence[str], table: Mapping[str, Sequence[str]], notes: Sequence[str]) -> None:
    """The lines show just this table, header by header, and then just these notes."""
    kept, under = [line.rstrip() for line in lines], ""
    while under != squeezed("".join(notes)):
        assert kept and len(under) < len(squeezed("".join(notes)))
        under = squeezed(kept.pop()) + under
    if table:
        assert list(columns_of(kept)) == [squeezed(name + "".join(cells)) for name, cells in table.items()]
    else:
        assert not "".join(kept).strip()


TYPE_NOTES = (
    "retrieval was not measured: it needs a causal model",
    "inputs of their own: induction 1.3 s, syntax 4.0 s",
    "score [95 % interval]; heads that have the type, of those measured; chance: what even attention scores",
    "redundant: distance to the nearest head, less is more alike",
    "syntax: the strongest are furthest above the best fixed offset",
)


def spelled(value: float, low: float, high: float, sign: str = "") -> str:
    return f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def type_columns(result: Analysis) -> dict[str, list[str]]:
    """Who is strongest is written down here, their numbers are the records'."""
    order = {
        "induction": [("L2H1", 0), ("L1H0", 0)],
        "previous_token": [("L0H1", 0)],
        "syntax": [("L1H2", 1), ("L2H1", 1)],
        "redundant": [("L1H0", 1), ("L1H2", 2)],
    }
    heads = {head.name: head for head in result.heads}
    columns: dict[str, list[str]] = {"type": [], "heads": [], "chance": [], "strongest": [], "second": []}
    for info in INFOS:
        columns["type"].append(info.name)
        columns["heads"].append("-" if info.skipped else f"{info.claimed} of {info.measured}")
        found = [heads[name].types[place] for name, place in order.get(info.name, [])]
        assert {f.type for f in found} <= {info.name}
        chance = found[0].chance if found else None
        columns["chance"].append("-" if chance is None else f"{chance:.3f}")
        cells = [
            f"{name} " + (f"{f.score:.3f}" if f.low is None or f.high is None else spelled(f.score, f.low, f.high))
            for (name, _), f in zip(order.get(info.name, []), found, strict=True)
        ]
        for header, cell in zip(("strongest", "second"), [*cells, "-", "-"], strict=False):
            columns[header].append(cell)
    return columns


EVIDENCE = (
    "L1H0 induction: 'cat' looks at 'sat' 0.555, in: the cat sat on the mat",
    "L1H0 induction, which attends less by 0.611 without L0H1, 0.099 without L0H2",
    "L0H1 previous_token: 'mat' looks at 'the' 0.912, '.' 0.041, in: the cat sat on the mat",
    "L1H2 syntax (nsubj to head): 'sat' looks at 'cat' 0.777, in: the cat sat on the mat"
    " (score 0.651, offset -1 alone 0.338)",
)
RELATION_NOTES = (
    "accuracy and difference [95 % interval]; p: corrected for heads, relations and directions",
    "too rare to measure: 2 of 5 pairs of relation and direction",
)


def relation_columns() -> dict[str, list[str]]:
    det, _, obj, nsubj, _ = RELATIONS
    rows = [obj, det, nsubj]
    return {
        "relation": ["obj to head", "det to head", "nsubj to dependent"],
        "head": [f"L{r['layer']}H{r['head']}" for r in rows],
        "accuracy": [spelled(r["accuracy"], r["low"], r["high"]) for r in rows],
        "best offset": [f"{r['offset']:+d} {r['offset_accuracy']:.3f}" for r in rows],
        "difference": [spelled(r["difference"], r["diff_low"], r["diff_high"], "+") for r in rows],
        "p": ["<0.001", "0.413", "0.987"],
        "words": ["1,234"] * 3,
        "chance": ["0.111"] * 3,
    }


COREFERENCE_NOTES = (
    "share of mentions whose antecedent is found [95 % interval]",
    "L1H2 over head match: +0.078 [+0.021, +0.137], p 0.012",
    "the head is chosen on 19 documents and scored on 21 others",
)


def coreference_columns() -> dict[str, list[str]]:
    return {
        "who answers": [f"{r['name']}, {r['kind']}" for r in COREFERENCE],
        "accuracy": [spelled(r["accuracy"], r["low"], r["high"]) for r in COREFERENCE],
        "mentions": [f"{r['mentions']:,}" for r in COREFERENCE],
    }


RETRIEVAL_COLUMNS = {
    "tokens": ["512", "4,096"],
    "passed": ["15 of 16", "3 of 16"],
    "recall": ["0.625", "0.125"],
    "depth 0": ["L2H3 0.921", "L2H1 0.337"],
    "depth 0.5": ["L2H2 0.864", "-"],
}
RETRIEVAL_NOTES = (
    "passed: trials in which the model tells the needle; then the best head at each depth, and its share copied",
    "8.3 % of the heads copy a tenth or more, 75.0 % nothing",
    "looking behind the latest match would copy 0.444",
)
SIMILARITY = (
    "3 heads on 2,048 rows: 2 redundant pairs, nearer than 0.15; 2 clusters at distances up to 0.35",
    "closest: L1H0 and L2H2 0.042, L1H0 and L2H2 0.052",
    "distance: 0 where heads attend alike, 1 where they share no key",
)
ABLATION_LINES = (
    "zeroing the 2 strongest induction heads adds 9.412 [9.105, 9.708] nats to a loss of 1.234 on the second copy",
    "2 random other heads add 1.612 ± 0.403 (20 draws, 0.911 to 2.567); the strongest add 5.8 times as much",
    "a random other head of the same layers adds 2.222 ± 0.505 (20 draws, 1.313 to 3.717);"
    " the strongest add 4.2 times as much",
    "on the first copy, where nothing is repeated yet (loss 11.567), the same heads add 0.321 [-0.004, 0.655],"
    " random others 0.211 ± 0.052, those of the same layers 0.277 ± 0.063",
    "zeroed, with scores: L2H1 0.952, L1H0 0.734",
    "nats a prediction; [95 % interval] over 16 sequences of random tokens, 50 a copy;"
    " ± a standard deviation over draws; seed 7",
)
MODEL = ("copying_share: 0.292", "more texts: 1,500", "more share: -")


def expected(result: Analysis) -> dict[str, tuple[Mapping[str, Sequence[str]], Sequence[str]]]:
    """Each section's table and lines."""
    return {
        "head types": (type_columns(result), TYPE_NOTES),
        "what they look at": ({}, EVIDENCE),
        "syntax: the best heads by relation": (relation_columns(), RELATION_NOTES),
        "coreference: antecedents found": (coreference_columns(), COREFERENCE_NOTES),
        "retrieval: needles copied": (RETRIEVAL_COLUMNS, RETRIEVAL_NOTES),
        "similarity": ({}, SIMILARITY),
        "ablation check": ({}, ABLATION_LINES),
        "the whole model": ({}, MODEL),
    }
