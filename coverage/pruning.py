"""Can heads be removed from every model type that verify rebuilds, with proof, or is it refused with a reason?

    python coverage/pruning.py --tiny-models DIR [--only bert,llama] [--jobs 2] [--out pruned.tsv]

Each type runs as a tiny random model. Of each stack, the first layer with several heads that verify rebuilds loses its
second group of heads that share a key-value head, and the pruned model runs beside the original with these heads
zeroed, in every attention implementation that the type has, and generating with a cache where it generates. Exit code 1
if any type is wrong or crashes, or fewer than 90 % of them are proved.

`DIR` is that of `run.py`.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# The package lies beside this folder.
sys.path.insert(1, str(Path(__file__).parents[1]))

import torch
from transformers import PreTrainedModel

from headscope.errors import HeadscopeError
from headscope.models.projections import projections, state_of
from headscope.models.sites import Site, find_sites
from headscope.proof.verify import verify
from headscope.pruning.probes import Probe
from headscope.pruning.proof import prove
from headscope.pruning.prune import prune_heads
from headscope.pruning.report import Equivalence
from run import arguments, on_all, one_line
from subjects import Subject, load_library, subject_of, tame

PROVED, REFUSED, UNSEEN, NOT_REBUILT = "proved", "refused", "without effect", "not rebuilt"
WRONG, CRASHED = "WRONG", "CRASHED"

# The share of what verify rebuilds that has to be proved.
MINIMUM = 0.9

# What heads have to change, relative to the largest output, so that the comparison says something; where it is less,
# the layer's output is made larger by these factors in turn.
_EFFECT = 1e-4
_LOUDER = (1.0, 1e2, 1e4)


@dataclass(frozen=True)
class Outcome:
    """What came of one stack of one type.

    Attributes:
        kind: `without effect`: the output does not depend on these heads, which proves nothing.
        relative: The largest difference between pruned and zeroed, relative to the largest output.
        effect: What zeroing changes, likewise.
        checks: Comparisons that were made.
    """

    model_type: str
    stack: str
    kind: str
    reason: str = ""
    relative: float = 0.0
    effect: float = 0.0
    checks: tuple[str, ...] = ()
    seconds: float = 0.0


def look_at(folder: Path, model_type: str) -> list[Outcome]:
    """All stacks of one type; one outcome without a stack where verify rebuilds nothing."""
    try:
        library = load_library(folder)
        model = tame(library.tiny_model(model_type))
        inputs = library.dummy_inputs(model_type, model)
        subject = subject_of(model, inputs)
        subject.inputs.update((k, v) for k, v in inputs.items() if k == "use_cache")  # some do not run with a cache
        torch.manual_seed(0)
        rebuilt = verify(model, inputs=subject.run_inputs(), backend="numpy")
        sites = _first_of_each_stack(subject, {(c.stack, c.layer) for c in rebuilt.sites if c.passed})
    except Exception as error:  # without a model, an input or a site that is rebuilt there is nothing to prune
        return [Outcome(model_type, "", NOT_REBUILT, one_line(error))]
    return [_pruned(model_type, subject, site) for site in sites] or [Outcome(model_type, "", NOT_REBUILT)]


def _first_of_each_stack(subject: Subject, rebuilt: set[tuple[str, int]]) -> list[Site]:
    first: dict[str, Site] = {}
    for site in find_sites(subject.model):
        if (site.stack, site.layer) in rebuilt and (site.stack not in first or _single(subject, first[site.stack])):
            first[site.stack] = site
    return list(first.values())


def _single(subject: Subject, site: Site) -> bool:
    """Whether a layer has one head only, as first stages of models of images have; it cannot lose it."""
    try:
        return state_of(site, projections(site, model=subject.model)).num_heads == 1
    except HeadscopeError:
        return False


def _pruned(model_type: str, subject: Subject, site: Site) -> Outcome:
    start = time.perf_counter()
    try:
        heads = {f"{site.stack}.{site.layer}": _second_group(subject, site)}
        prune_heads(copy.deepcopy(subject.model), heads)  # what is refused is refused before anything is made louder
        found = _proof(subject, site, heads)
    except HeadscopeError as error:
        return Outcome(model_type, site.stack, REFUSED, error.message)
    except Exception as error:  # whatever it is, it must show as this type's fault
        return Outcome(model_type, site.stack, CRASHED, one_line(error))
    kind = WRONG if not found.passed else PROVED if _effect(found) >= _EFFECT else UNSEEN
    reason = "; ".join(found.failures) or ("" if found.passed else "other outputs")
    checks = tuple(f"{c.mode} ({c.implementation})" for c in found.checks)
    seconds = time.perf_counter() - start
    return Outcome(model_type, site.stack, kind, reason, found.relative, _effect(found), checks, seconds)


def _proof(subject: Subject, site: Site, heads: Mapping[str, Sequence[int]]) -> Equivalence:
    for factor in _LOUDER:
        original = copy.deepcopy(subject.model)
        output = projections(_twin(original, site), model=original).output
        if output is not None:
            with torch.no_grad():
                output.weight.owner.get_parameter(output.weight.name).mul_(factor)
        pruned = copy.deepcopy(original)
        prune_heads(pruned, heads)
        found = prove(original, pruned, batches=[Probe("made up", subject.run_inputs())])
        if not found.passed or _effect(found) >= _EFFECT:
            break
    return found


def _twin(model: PreTrainedModel, site: Site) -> Site:
    """The same site of a copy."""
    return next(other for other in find_sites(model) if (other.stack, other.layer) == (site.stack, site.layer))


def _effect(found: Equivalence) -> float:
    return max((c.effect for c in found.checks if c.effect is not None), default=0.0)


def _second_group(subject: Subject, site: Site) -> list[int]:
    state = state_of(site, projections(site, model=subject.model))
    size = state.group if state.num_kv_heads > 1 else 1
    return list(range(size, 2 * size)) if state.num_heads > size else [0]


# ------------------------------------------------------------------ the report
def kind_of(outcomes: Sequence[Outcome]) -> str:
    """A type's kind: that of its worst stack, and proved where one stack is and others are refused or show nothing."""
    kinds = {outcome.kind for outcome in outcomes}
    return next(kind for kind in (CRASHED, WRONG, PROVED, REFUSED, UNSEEN, NOT_REBUILT) if kind in kinds)


def lines(types: Sequence[list[Outcome]]) -> list[str]:
    """Types by kind, refusals by reason, a line for each fault."""
    kinds = Counter(map(kind_of, types))
    rebuilt = len(types) - kinds[NOT_REBUILT]
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in (PROVED, REFUSED, UNSEEN, WRONG, CRASHED))
    result = [f"{rebuilt} of {len(types)} types are rebuilt by verify: {counts}"]
    every = [outcome for outcomes in types for outcome in outcomes]
    reasons: dict[str, list[str]] = {}
    for outcome in every:
        if outcome.kind == REFUSED:
            reasons.setdefault(_general(outcome.reason), []).append(f"{outcome.model_type}.{outcome.stack}")
    result += [
        f"refused {len(names)}: {why}: {', '.join(names)}" for why, names in sorted(reasons.items(), key=_by_size)
    ]
    faults = (UNSEEN, WRONG, CRASHED)
    result += [f"{o.kind} {o.model_type}.{o.stack}: {o.reason}".rstrip(": ") for o in every if o.kind in faults]
    proved = [o for o in every if o.kind == PROVED]
    if proved:
        generated = len({o.model_type for o in proved if any("generate" in check for check in o.checks)})
        worst = max(proved, key=lambda o: o.relative)
        result.append(
            f"{len(proved)} stacks proved, {generated} types while generating; largest relative difference "
            f"{worst.relative:.1e} ({worst.model_type}.{worst.stack}), smallest effect of the heads "
            f"{min(o.effect for o in proved):.1e}"
        )
    return result


def _general(reason: str) -> str:
    """A reason without the path of the module."""
    if reason.startswith("no heads can be removed from"):
        return reason.partition("): ")[2]
    first, _, rest = reason.partition(" ")
    return rest if "." in first else reason


def _by_size(item: tuple[str, list[str]]) -> int:
    return -len(item[1])


def passes(types: Sequence[list[Outcome]], minimum: float = MINIMUM) -> bool:
    """Whether nothing is wrong and enough of what is rebuilt is proved."""
    kinds = Counter(map(kind_of, types))
    rebuilt = len(types) - kinds[NOT_REBUILT]
    return not kinds[WRONG] and not kinds[CRASHED] and kinds[PROVED] >= minimum * rebuilt


def write_tsv(types: Sequence[list[Outcome]], path: Path) -> None:
    """One line a stack."""
    rows = ["\t".join(("type", "stack", "kind", "relative", "effect", "seconds", "checks", "reason"))]
    for o in (outcome for outcomes in types for outcome in outcomes):
        numbers = (f"{o.relative:.1e}", f"{o.effect:.1e}", f"{o.seconds:.2f}")
        rows.append("\t".join((o.model_type, o.stack, o.kind, *numbers, ", ".join(o.checks), o.reason)))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def main() -> None:
    """Prune all types, print the report, say whether it is good enough."""
    wanted = arguments(__doc__)
    types = wanted.only.split(",") if wanted.only else load_library(wanted.tiny_models).iter_model_types()
    start = time.perf_counter()
    found = on_all(look_at, wanted.tiny_models, types, wanted.jobs)
    print(*lines(found), sep="\n")
    print(f"{time.perf_counter() - start:.0f} s")
    if wanted.out:
        write_tsv(found, wanted.out)
    if not passes(found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
