"""What removing heads costs with a repair and without, on text that nothing was chosen on and on text of another kind.

    python benchmarks/repair.py [--model smollm2|packaged|DIRECTORY] [--shares 0.2,0.3,0.5] [--unit head|kv-group]
                                [--methods gradient,surgeon] [--repaired surgeon]
                                [--ranking 12288] [--repair 32768] [--report 4096]

Texts are Python's own help texts, whole ones for ranking, repair or report; the others a licence and Python source.
Heads are zeroed, which costs what removing them costs. A line for each method and share, one more with a repair:
the loss that is added a prediction (nats, or 1 - cosine), and its standard error over texts.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import pydoc_data.topics
import time
from collections.abc import Sequence

from benchmarks.figures import Figure, single, table
from benchmarks.models import model_path
from headscope.capture.evaluation import evaluating
from headscope.capture.outputs import find_outputs
from headscope.importance.allocate import allocate, count_of
from headscope.importance.examples import Examples
from headscope.importance.loss import measure
from headscope.importance.methods import method_named
from headscope.importance.texts import Data, Share, cut, deal, ready
from headscope.models.loading import LoadedModel
from headscope.models.whole import whole_model
from headscope.pruning.choosing import scores_by
from headscope.pruning.zeroing import zeroed_copy
from headscope.repair.repair import repair


def licence() -> str:
    """The licence that Python carries with it."""
    out = io.StringIO()
    printer = builtins.license
    with contextlib.redirect_stdout(out):
        printer._Printer__setup()  # type: ignore[attr-defined]  # printing it would ask for keys
    return "\n".join(printer._Printer__lines)  # type: ignore[attr-defined]  # as above


def of_other_kinds(loaded: LoadedModel) -> dict[str, Data]:
    """2,048 tokens of a licence and of source code."""
    with open(argparse.__file__, encoding="utf-8") as file:
        texts = {"licence": licence(), "source": file.read()}
    return {name: ready(loaded, cut(loaded, Examples((text,), (None,)))[:8]) for name, text in texts.items()}


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shares", default="0.2,0.3,0.5")
    parser.add_argument("--unit", default="head")
    parser.add_argument("--methods", default="gradient,surgeon")
    parser.add_argument("--repaired", default="surgeon")
    for name, tokens in (("ranking", 12_288), ("repair", 32_768), ("report", 4_096)):
        parser.add_argument(f"--{name}", type=int, default=tokens)
    options = parser.parse_args(arguments)
    names = {"revision": None, "device": "cpu", "dtype": "float32", "device_map": None, "trust_remote_code": False}
    loaded = whole_model(model_path(options.model), None, None, names)
    texts = tuple(t for t in pydoc_data.topics.topics.values() if len(t) > 200)
    roles = ("ranking", "repair", "report")
    shares = {role: Share(getattr(options, role), getattr(options, role)) for role in roles}
    dealt = deal(cut(loaded, Examples(texts, (None,) * len(texts))), shares)
    data = {role: ready(loaded, pieces) for role, pieces in dealt.items()}
    judges = {"report": data["report"]} | of_other_kinds(loaded)
    print({role: f"{d.texts} texts, {d.tokens} tokens" for role, d in (data | judges).items()}, flush=True)
    with evaluating(loaded.model):
        for one in (*data.values(), *judges.values()):
            one.loss.remember(loaded.model, one.batches)
        return compare(loaded, data, judges, options)


def compare(
    loaded: LoadedModel, data: dict[str, Data], judges: dict[str, Data], options: argparse.Namespace
) -> list[Figure]:
    """What each repair leaves of the loss that the first method adds alone; prints a line for each."""
    alone: dict[float, dict[str, tuple[float, float]]] = {}
    figures: list[Figure] = []
    model = loaded.model
    outputs = find_outputs(model)
    base = {name: measure(model, d.batches, d.loss) for name, d in judges.items()}
    print("losses before: " + ", ".join(f"{name} {found.mean:.4f}" for name, found in base.items()), flush=True)
    first, *_ = methods = options.methods.split(",")
    for name in methods:
        method = method_named(name)
        scored = scores_by(model, outputs, method, data["ranking"], options.unit, 0, lambda line: None)
        for share in map(float, options.shares.split(",")):
            count = count_of(outputs, options.unit, share)
            heads = allocate(outputs, scored, count, unit=options.unit)
            for refit in (None, data["repair"]) if name in options.repaired.split(",") else (None,):
                after, _ = zeroed_copy(model, heads)
                start = time.perf_counter()
                if refit is not None:
                    repair(model, after, refit.batches)
                taken = time.perf_counter() - start
                added = {n: measure(after, d.batches, d.loss).added(base[n]) for n, d in judges.items()}
                print(
                    f"{name:<15} {share:>4.0%} {'no repair' if refit is None else f'{refit.tokens} tokens':<13}"
                    + "".join(f"   {n} {mean:.4f} ± {error:.4f}" for n, (mean, error) in added.items())
                    + ("" if refit is None else f"   {taken:.0f} s"),
                    flush=True,
                )
                if refit is None:
                    alone.setdefault(share, added)
                else:
                    figures += [
                        single(
                            f"{share:.0%} of {options.unit}s, {judge}: {name} and repair / {first}",
                            mean / alone[share][judge][0],
                            goal_of(options.unit, share) if judge == "report" else 0.35,
                        )
                        for judge, (mean, _) in added.items()
                    ]
    return figures


def goal_of(unit: str, share: float) -> float | None:
    """What a repair should leave at most, on text like its own."""
    return {("head", 0.2): 0.25, ("head", 0.3): 0.15, ("head", 0.5): 0.12, ("kv-group", 0.3): 0.25}.get((unit, share))


if __name__ == "__main__":
    print(table(main()))
