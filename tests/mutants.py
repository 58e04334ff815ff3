"""How many small faults in a module its tests notice.

    python -m tests.mutants headscope/heads/rules.py --tests tests/test_rules.py tests/test_labels.py

A mutant is the module with one change in one function: another comparison, operator or number, a condition that is
always true or never, a slice without a bound, a statement less, None returned. Tests are collected once. Each mutant is
a fork in which the changed code is put into the functions that are there, and in which the tests that reach the changed
lines run, the quickest first and each before it has other parameters, until one fails or `--seconds` of tests are over.
A fork that needs 20 s and four times the time of its tests counts as caught. Hypothesis draws the same 25 examples each
time. Annotations, texts of errors, defaults and what stands outside of functions are left as they are.

Survivors are printed one a line. Read each: some changes are none that anybody can see.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import os
import pickle
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings


def _both_ways(pairs: str) -> dict[str, str]:
    return {a: b for pair in pairs.split(", ") for a, b in (pair.split(), pair.split()[::-1])}


SIGNS = {"Pow": "Mult", "FloorDiv": "Mult", "Mod": "FloorDiv"} | _both_ways(
    "Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, Add Sub, Mult Div, BitAnd BitOr, LShift RShift, And Or"
)
NAMES = _both_ways("min max, amin amax, minimum maximum, any all, argmin argmax, triu tril, startswith endswith")


# ------------------------------------------------------------------ what can be changed
def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What could stand in the place of a node."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield _with(node, ops=[*ops[:i], getattr(ast, SIGNS[type(op).__name__])(), *ops[i + 1 :]])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op).__name__ in SIGNS:
            yield _with(node, op=getattr(ast, SIGNS[type(op).__name__])())
        case ast.UnaryOp(operand=operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=str(value)):
            yield ast.Constant(value + "?")
        case ast.Name(id=name) if name in NAMES:
            yield _with(node, id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield _with(node, attr=NAMES[name])
        case ast.Slice():
            yield from (_with(node, **{bound: None}) for bound in ("lower", "upper", "step") if getattr(node, bound))
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            yield from (_with(node, test=ast.Constant(value)) for value in (True, False))
        case ast.comprehension(ifs=[_, *_]):
            yield _with(node, ifs=[])
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
    match node:
        case ast.Expr(value=value) if not isinstance(value, ast.Constant | ast.Yield | ast.YieldFrom):
            yield ast.Pass()
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Delete() | ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def _with(node: ast.AST, **other: object) -> ast.AST:
    new = copy.copy(node)
    vars(new).update(other)
    return new


def _within(node: ast.AST, lines: range) -> Iterator[tuple[ast.AST, range]]:
    """All that can be changed in a node, and on which lines its statement stands, without those of its body."""
    for field, child in ((f, c) for f, v in ast.iter_fields(node) for c in (v if isinstance(v, list) else [v])):
        text = isinstance(node, ast.Raise) or isinstance(child, ast.JoinedStr) or field in ("annotation", "returns")
        heading = field in ("args", "decorator_list") and isinstance(node, ast.FunctionDef)
        docstring = isinstance(node, ast.Expr) and isinstance(child, ast.Constant)
        if isinstance(child, ast.AST) and not (text or heading or docstring):
            own = lines
            if isinstance(child, ast.stmt):
                body = getattr(child, "body", None)
                own = range(child.lineno, max(child.lineno, body[0].lineno - 1 if body else child.end_lineno or 0) + 1)
            yield child, own
            yield from _within(child, own)


@dataclass(frozen=True)
class Mutant:
    """The module in which node `place`, in the order of `ast.walk`, is its `number`-th change."""

    lines: range
    place: int
    number: int
    text: str

    def codes(self, source: str, file: str) -> dict[tuple[str, int], CodeType]:
        """The changed module's functions, by qualified name and first line."""
        tree = ast.parse(source)
        node = list(ast.walk(tree))[self.place]
        new = ast.copy_location(copy.copy(list(changes(node))[self.number]), node)
        node.__class__, node.__dict__ = type(new), vars(new)
        waiting = [compile(ast.fix_missing_locations(tree), file, "exec")]
        found: dict[tuple[str, int], CodeType] = {}
        while waiting:
            inner = [c for c in waiting.pop().co_consts if isinstance(c, CodeType)]
            found |= {(c.co_qualname, c.co_firstlineno): c for c in inner}
            waiting += inner
        return found


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module."""
    tree = ast.parse(source)
    places = {id(node): i for i, node in enumerate(ast.walk(tree))}
    owners: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    functions = [node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef)]
    found = []
    for function in functions:
        for node, lines in _within(function, range(0)):
            before = ast.unparse(node).partition("\n")[0]
            for i, new in enumerate(changes(node)):
                text = f"{lines.start} {function.name}: {before}  →  {ast.unparse(new).partition(chr(10))[0] or 'pass'}"
                found.append(Mutant(lines, places[id(node)], i, text))
    return found


# ------------------------------------------------------------------ running tests
@dataclass
class Mutating:
    """A pytest plugin that runs the collected tests once for every mutant instead of once."""

    args: argparse.Namespace

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Called by pytest after it has collected."""
        live = [f for f in gc.get_objects() if type(f) is FunctionType]
        files = [os.path.abspath(module) for module in self.args.modules]
        gc.freeze()
        with NamedTemporaryFile() as store:
            _fork(lambda: Path(store.name).write_bytes(pickle.dumps(_traced(session.items, files))), 3000)
            reached, seconds = pickle.loads(Path(store.name).read_bytes())
        for file in files:
            source, name = Path(file).read_text(), os.path.relpath(file)
            functions = [f for f in live if f.__code__.co_filename == file]
            every, caught = mutants(source), 0
            numbers = random.Random(f"{self.args.seed} {name}").sample(range(len(every)), len(every))
            some = [every[i] for i in sorted(numbers[: self.args.sample])]
            for mutant in some:
                tests = [i for i in session.items if not reached[i.nodeid, file].isdisjoint(mutant.lines)]
                tests = _in_turn(tests, seconds, self.args.seconds)
                limit = 20 + 4 * sum(seconds[item.nodeid] for item in tests)
                if _fork(partial(_try, functions, mutant.codes(source, file), tests), limit):
                    caught += 1
                else:
                    print(f"  {name}:{mutant.text}  ({len(tests)} tests)", flush=True)
            print(f"{name}: {caught} of {len(some)} caught, {len(every)} in all", flush=True)
        return True


def _in_turn(items: list[pytest.Item], seconds: dict[str, float], most: float) -> list[pytest.Item]:
    """Tests until `most` seconds are over: all functions with their quickest parameters, then with their next."""
    count, turns = Counter[str](), {}
    for item in sorted(items, key=lambda item: seconds[item.nodeid]):
        function = item.nodeid.partition("[")[0]
        turns[item] = count[function]
        count[function] += 1
    order = sorted(turns, key=turns.__getitem__)
    start = accumulate((seconds[item.nodeid] for item in order), initial=0.0)
    return [item for item, before in zip(order, start, strict=False) if before < most]


def _fork(work: Callable[[], object], limit: float) -> bool:
    """Whether work in a fork fails, or needs more than so many seconds of processor time."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    end = int(time.process_time() + limit) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (end, end))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    signal.alarm(20 * end)  # for what sleeps
    try:
        work()
    except BaseException:  # whatever a mutant does
        os._exit(1)
    os._exit(0)


def _try(functions: list[FunctionType], new: dict[tuple[str, int], CodeType], tests: list[pytest.Item]) -> None:
    for function in functions:
        old = function.__code__
        code = new.get((old.co_qualname, old.co_firstlineno), old)
        if code.co_freevars == old.co_freevars:
            function.__code__ = code
    for item, following in zip(tests, [*tests[1:], None], strict=True):
        assert not _failed(item, following)


def _traced(items: list[pytest.Item], files: list[str]) -> tuple[dict[tuple[str, str], set[int]], dict[str, float]]:
    """The lines of files that each test reaches, none where it fails as it is, and the seconds that it needs."""
    reached, seconds = {(item.nodeid, file): set[int]() for item in items for file in files}, {}

    def follow(frame: FrameType, event: str, _: object) -> Any:
        lines = reached.get((item.nodeid, frame.f_code.co_filename))
        if lines is None:
            return None
        lines.add(frame.f_lineno)
        return follow

    for item, following in zip(items, [*items[1:], None], strict=True):
        start = time.process_time()
        sys.settrace(follow)
        failed = _failed(item, following)
        sys.settrace(None)
        seconds[item.nodeid] = time.process_time() - start
        if failed:
            reached.update({(item.nodeid, file): set() for file in files})
    return reached, seconds


def _failed(item: pytest.Item, following: pytest.Item | None) -> bool:
    return any(report.failed for report in runtestprotocol(item, nextitem=following, log=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="+", metavar="MODULE")
    parser.add_argument("--tests", nargs="+", required=True, help="test files")
    parser.add_argument("--skip", help="names of tests to leave out, as for pytest's -k")
    parser.add_argument("--sample", type=int, default=60, help="mutants a module (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=6, help="of tests a mutant (default: 6)")
    given = parser.parse_args()
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", max_examples=25, derandomize=True, database=None, deadline=None, phases=phases)
    settings.load_profile("mutants")
    options = ["-q", "-s", "-p", "no:cacheprovider", *(["-k", f"not ({given.skip})"] if given.skip else [])]
    pytest.main([*options, *given.tests], plugins=[Mutating(given)])
