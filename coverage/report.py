"""What came of all types: a table by modality and outcome, refusals by reason, a line for each fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from judgement import NONE, REFUSED, RETURNED, SCORES, WRONG, Verdict

NOT_RUN, CRASHED = "does not run here", "CRASHED"

OUTCOMES = (RETURNED, SCORES, REFUSED, NONE, NOT_RUN, WRONG, CRASHED)

_COLUMNS = ("equal to output_attentions", "equal to scores", "refused", "no attention", "not run", "WRONG", "CRASHED")

# Groups of reasons, by what their messages say.
_REASONS = {
    "not one matrix an example": "attends within windows, chunks or frames",
    "not one row and one column a token": "attends between more, fewer or other things than the text's tokens",
    "cannot be read yet": "computes attention in modules whose layout is not known",
    "returned no attention weights": "keeps its attention weights to itself",
    "modules returned attention weights": "keeps its attention weights to itself",
    "tokens that it picks": "attends between more, fewer or other things than the text's tokens",
    "between channels": "attends between more, fewer or other things than the text's tokens",
    "more than once": "one module computes several attentions in a pass",
    "not attention weights": "what it calls attention weights are scores or approximations",
    "NaN": "its attention weights are NaN",
    "fails on this input": "the model itself fails when it is asked for its weights",
    "does not give": "streaming does not give what the model computes",
}


@dataclass(frozen=True)
class Row:
    """One model type."""

    model_type: str
    modality: str
    verdict: Verdict
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether it was measured and every number is right."""
        return self.verdict.outcome in (RETURNED, SCORES)

    @property
    def fault(self) -> bool:
        """Whether headscope or this harness is at fault."""
        return self.verdict.outcome in (WRONG, CRASHED)


def reason_group(message: str) -> str:
    """The group of a reason."""
    return next((group for phrase, group in _REASONS.items() if phrase in message), "other")


def lines(rows: Sequence[Row]) -> list[str]:
    """The whole report."""
    equal = [row for row in rows if row.equal]
    result = [*_table(rows), ""]
    result += _grouped("refused", ((row, row.verdict.reason) for row in rows if row.verdict.outcome == REFUSED))
    partly = ((row, reason) for row in equal for reason in row.verdict.left_out)
    result += _grouped("equal, with layers left out", partly)
    result += [f"{row.verdict.outcome} {row.model_type}: {row.verdict.reason}" for row in rows if row.fault]
    if equal:
        worst = max(equal, key=lambda row: row.verdict.worst)
        heads = sum(row.verdict.heads for row in equal)
        result.append(
            f"{heads:,} heads of {len(equal)} types measured, {sum(row.verdict.streamed for row in equal)} types "
            f"streamed; largest difference {worst.verdict.worst:.1e} ({worst.model_type})"
        )
    return result


def _table(rows: Sequence[Row]) -> list[str]:
    counts = Counter((row.modality, row.verdict.outcome) for row in rows)
    modalities = sorted({row.modality for row in rows}, key=lambda m: (m == "not known", m))
    table = [("", "types", *_COLUMNS)]
    for name in modalities:
        numbers = [counts[name, outcome] for outcome in OUTCOMES]
        table.append((name, *(str(n) for n in (sum(numbers), *numbers))))
    totals = [sum(counts[name, outcome] for name in modalities) for outcome in OUTCOMES]
    table.append(("all", *(str(n) for n in (sum(totals), *totals))))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in table
    ]


def _grouped(title: str, reasons: Iterable[tuple[Row, str]]) -> list[str]:
    groups: dict[str, dict[str, None]] = {}
    for row, reason in reasons:
        groups.setdefault(reason_group(reason), {})[row.model_type] = None
    if not groups:
        return []
    types = {name for members in groups.values() for name in members}
    by_size = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [f"{title}: {len(types)}", *(f"  {len(m):3}  {group}: {', '.join(m)}" for group, m in by_size), ""]


def write_tsv(rows: Sequence[Row], path: Path) -> None:
    """One line a type."""
    names = ("type", "modality", "outcome", "layers", "returned", "heads", "worst", "streamed", "seconds", "reason")
    out = ["\t".join((*names, "left_out"))]
    for row in rows:
        v = row.verdict
        numbers = (*v.layers, v.heads, f"{v.worst:.1e}", v.streamed, f"{row.seconds:.2f}")
        texts = (v.reason, " | ".join(v.left_out))
        cells = (row.model_type, row.modality, v.outcome, *numbers, *(" ".join(t.split()) for t in texts))
        out.append("\t".join(str(cell) for cell in cells))
    path.write_text("\n".join(out) + "\n", encoding="utf-8")


def passes(rows: Sequence[Row], minimum: int) -> bool:
    """Whether nothing is wrong and enough types are equal."""
    return not any(row.fault for row in rows) and sum(row.equal for row in rows) >= minimum
