"""Scores, guided pruning and curves on the command line: what is asked of the Python API, and what is refused."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headscope
from headscope.cli import guided
from headscope.cli.main import main
from tests.importance_samples import curve, importance
from tests.test_views_choosing import CHOSEN, REPAIR
from tests.test_views_pruning import equivalence, result

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command in a directory with `texts.txt`, `other.txt`, `scores.json` and `old.png`."""
    monkeypatch.chdir(tmp_path)
    for name in ("texts.txt", "other.txt", "scores.json", "old.png", "half.csv"):
        Path(name).write_text("some text\n")

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([*arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What the Python API was called with, by function; it answers with samples."""
    calls: dict[str, dict[str, Any]] = {}

    def stand_in(name: str, answer: object) -> Callable[..., object]:
        def function(model: str | None, *given: object, report: Any = None, **ways: object) -> object:
            calls[name] = {"model": model, "given": given, "report": report, **ways}
            if report is not None:
                report("about N passes")
                report("about N passes")
            return answer

        return function

    answers = {
        "head_importance": importance(2, 4, group=2),
        "prune": result(chosen=CHOSEN, repair=REPAIR),
        "prune_curve": curve(),
    }
    for name, answer in answers.items():
        # setitem, not setattr: to look at the real function first would import its module.
        monkeypatch.setitem(vars(headscope), name, stand_in(name, answer))
    return calls


# ------------------------------------------------------------------ the names of the methods
def test_the_command_line_knows_all_methods() -> None:
    from headscope.importance.methods import METHODS

    assert sorted(guided.METHODS) == sorted(METHODS)
    assert sorted(guided.WITHOUT_DATA) == sorted(name for name, method in METHODS.items() if not method.needs_data)
    assert sorted(guided.FOR_REPAIR) == sorted(name for name, method in METHODS.items() if method.for_repair)


@pytest.mark.parametrize("command", ["importance", "prune"])
def test_help_lists_the_methods_without_torch(command: str) -> None:
    script = (
        f"import sys\nfrom headscope.cli.main import main\ntry:\n    main([{command!r}, '--help'])\n"
        "except SystemExit:\n    print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "matplotlib"} & set(done.stderr.split()) == set()
    words = " ".join(done.stdout.replace("│", " ").split())
    for name in guided.METHODS:
        assert name in words


# ------------------------------------------------------------------ importance
def test_importance_asks_for_what_was_given(run, asked) -> None:
    given = "--data texts.txt --method ablation --with mean --unit kv-group --normalize --stack encoder,cross"
    more = "--max-length 64 --batch-size 2 --tokens 500 --model m --seed 3 --dtype float32 --tokenizer t"
    code, out, err = run("importance", *given.split(), *more.split())
    found = asked["head_importance"]
    assert code == 0 and "self: heads" in out and "a/model" in err and err.count("note: about N passes") == 1
    assert found["given"] == ("texts.txt",) and found["model"] == "m"
    wanted = {"method": "ablation", "replace": "mean", "units": ("kv-group",), "normalise": True}
    wanted |= {"stack": ["encoder", "cross"], "max_length": 64, "batch_size": 2, "tokens": 500}
    wanted |= {"seed": 3, "dtype": "float32", "tokenizer": "t", "trust_remote_code": False, "device": "auto"}
    assert {name: found[name] for name in wanted} == wanted


def test_importance_defaults(run, asked) -> None:
    code, _, err = run("importance", "--method", "random", "--quiet")
    found = asked["head_importance"]
    assert code == 0 and err == "" and found["given"] == (None,) and found["report"] is None
    assert found["units"] == ("head", "kv-group") and found["replace"] == "zero" and found["stack"] is None
    run("importance", "--method", "random", "--unit", "head")
    assert asked["head_importance"]["units"] == ("head",)


def test_importance_formats_and_files(run, asked) -> None:
    data = ("importance", "--data", "texts.txt", "--quiet")
    code, out, _ = run(*data, "--format", "json")
    assert code == 0 and json.loads(out) == importance(2, 4, group=2).to_dict()
    code, out, _ = run(*data, "--output", "new.json")
    assert code == 0 and out == "" and json.loads(Path("new.json").read_text()) == importance(2, 4, group=2).to_dict()
    code, out, err = run(*data, "--output", "new.json")
    assert code == 2 and "new.json exists" in err and "--force" in err
    assert run(*data, "--output", "new.json", "--force")[0] == 0
    assert run(*data, "--output", "new.csv")[0] == 0 and Path("new.csv").read_text().startswith("unit,stack,layer")
    assert run(*data, "--output", "new.txt")[0] == 0 and "self: heads" in Path("new.txt").read_text()
    assert len(run(*data, "--format", "jsonl")[1].splitlines()) == 12
    assert run(*data, "--format", "markdown")[1].startswith("# ")


def test_a_method_for_repair_says_so(run, asked, monkeypatch) -> None:
    said = "of use with --repair only: without it, gradient is better"
    assert said not in run("importance", "--data", "texts.txt")[2]
    for method in guided.FOR_REPAIR:
        monkeypatch.setitem(vars(headscope), "head_importance", lambda *_, m=method, **__: importance(1, 2, method=m))
        _, out, err = run("importance", "--data", "texts.txt", "--method", method, "--quiet")
        assert f"note: {method} scores are {said}" in err and said not in out


# ------------------------------------------------------------------ prune
def test_prune_asks_for_what_was_given(run, asked) -> None:
    given = "--method surgeon --data texts.txt --drop 0.3 --unit head --min-per-layer 2 --steps 3 --repair other.txt"
    more = "--repair-mlp --max-length 64 --batch-size 2 --seed 4 --no-latency --save-as masked"
    code, out, err = run("prune", *given.split(), *more.split())
    found = asked["prune"]
    assert code == 0 and "81 of 270 heads (30.0 %) by surgeon" in out and "repair applied" in out
    assert found["given"] == (None,) and "note: about N passes" in err
    wanted = {"method": "surgeon", "data": "texts.txt", "drop": 0.3, "until_drop": None, "unit": "head"}
    wanted |= {"min_per_layer": 2, "steps": 3, "repair": "other.txt", "repair_mlp": True, "scores": None}
    wanted |= {"max_length": 64, "batch_size": 2, "seed": 4, "latency": False, "save_as": "masked"}
    assert {name: found[name] for name in wanted} == wanted
    assert "prune_curve" not in asked


def test_prune_by_a_file_of_scores(run, asked) -> None:
    code, _, _ = run("prune", "--scores", "scores.json", "--until-drop", "1%", "--data", "texts.txt", "--quiet")
    found = asked["prune"]
    assert code == 0 and found["scores"] == Path("scores.json") and found["until_drop"] == "1%"
    assert found["unit"] is None and found["method"] is None and found["repair"] is False and found["report"] is None


def test_one_file_for_two_things_is_dealt_out(run, asked) -> None:
    run("prune", "--scores", "scores.json", "--drop", "0.1", "--data", "texts.txt", "--repair", "./texts.txt")
    assert asked["prune"]["repair"] is True and asked["prune"]["data"] == "texts.txt"
    run("prune", "--heads", "0:1", "--repair", "texts.txt")
    assert asked["prune"]["repair"] == "texts.txt" and asked["prune"]["given"] == (["0:1"],)


def test_what_is_not_proved_fails(run, asked, monkeypatch) -> None:
    monkeypatch.setitem(vars(headscope), "prune", lambda *_, **__: result(equivalence=equivalence(passed=False)))
    assert run("prune", "--scores", "scores.json", "--drop", "0.1", "--quiet")[0] == 1


# ------------------------------------------------------------------ curve
def test_a_curve_is_a_picture_numbers_and_a_table(run, asked) -> None:
    given = "--curve new.PNG --data texts.txt --curve-methods random,gradient --repair-mlp --repair other.txt"
    code, out, err = run("prune", *given.split(), "--seed", "2")
    assert code == 0 and "of 270 heads" in out and "surgeon, repaired" in out and "report 16 texts" in err
    assert Path("new.PNG").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(Path("new.csv").read_text().splitlines()))
    assert [float(r["added"]) for r in rows] == [p.added for p in curve().points]
    found = asked["prune_curve"]
    wanted = {"methods": ["random", "gradient"], "data": "texts.txt", "repair": "other.txt", "repair_mlp": True}
    wanted |= {"seed": 2, "unit": "head", "min_per_layer": 1}
    assert {name: found[name] for name in wanted} == wanted and "prune" not in asked


def test_a_curve_repairs_unless_told_where_from(run, asked) -> None:
    arguments = ("prune", "--curve", "new.svg", "--data", "texts.txt", "--unit", "kv-group", "--quiet")
    code, out, err = run(*arguments, "--format", "json")
    assert code == 0 and err == "" and json.loads(out) == curve().to_dict()
    assert asked["prune_curve"]["repair"] is True and asked["prune_curve"]["unit"] == "kv-group"
    assert "methods" not in asked["prune_curve"] and Path("new.svg").read_text().startswith("<?xml")
    code, _, err = run(*arguments)
    assert code == 2 and "new.svg exists" in err
    assert run(*arguments, "--force")[0] == 0


# ------------------------------------------------------------------ what is refused
GUIDED = "--method gradient --data texts.txt"
BAD = {
    "importance": {
        "no texts": ("", "gradient scores heads on texts"),
        "no texts for surgeon": ("--method surgeon", "surgeon scores heads on texts"),
        "unknown method": ("--method magic", "no importance method 'magic'"),
        "a mean without ablation": ("--data texts.txt --with mean", "--with is for ablation"),
        "a third replacement": ("--data texts.txt --with noise", "noise"),
        "unknown unit": ("--data texts.txt --unit layer", "layer"),
        "no tokens": ("--data texts.txt --tokens 0", "--tokens"),
        "unknown format": ("--data texts.txt -f xml", "xml"),
        "unknown suffix": ("--data texts.txt -o a.docx", ".docx"),
        "what exists": ("--data texts.txt -o scores.json", "scores.json exists"),
    },
    "prune": {
        "nothing": ("", "nothing says which heads go"),
        "heads and scores": ("--heads 0:1 --scores scores.json --drop 0.1", "--heads and --scores exclude"),
        "scores and method": (f"{GUIDED} --scores scores.json --drop 0.1", "--scores and --method exclude"),
        "heads and curve": ("--heads 0:1 --curve a.png --data texts.txt", "--heads and --curve exclude"),
        "no share": (GUIDED, "nothing says how much goes"),
        "no share for scores": ("--scores scores.json", "nothing says how much goes"),
        "two shares": (f"{GUIDED} --drop 0.3 --until-drop 1%", "--drop and --until-drop exclude"),
        "a share without scores": ("--heads 0:1 --drop 0.3", "--drop needs scores"),
        "a bound without scores": ("--heads 0:1 --until-drop 1%", "--until-drop needs scores"),
        "a unit without scores": ("--heads 0:1 --unit head", "--unit needs scores"),
        "a minimum without scores": ("--heads 0:1 --min-per-layer 2", "--min-per-layer needs scores"),
        "steps without scores": ("--heads 0:1 --steps 2", "--steps needs scores"),
        "steps with a file": ("--scores scores.json --drop 0.1 --steps 2", "--steps scores anew"),
        "steps with a bound": (f"{GUIDED} --until-drop 1% --steps 2", "--steps scores anew"),
        "a method without texts": ("--method gradient --drop 0.3", "--method gradient needs texts"),
        "a bound without texts": ("--scores scores.json --until-drop 1%", "--until-drop needs texts"),
        "unknown method": ("--method magic --drop 0.3", "no importance method 'magic'"),
        "surgeon alone": ("--method surgeon --data texts.txt --drop 0.3", "without it, gradient is better"),
        "reconstruction alone": ("--method reconstruction --data texts.txt --drop 0.3", "gradient is better"),
        "down projections alone": (f"{GUIDED} --drop 0.3 --repair-mlp", "--repair-mlp needs --repair"),
        "texts that nobody reads": ("--heads 0:1 --data texts.txt", "--heads names them"),
        "methods of no curve": (f"{GUIDED} --drop 0.3 --curve-methods random", "--curve-methods needs --curve"),
        "a share that is none": (f"{GUIDED} --drop much", "--drop"),
        "no steps": (f"{GUIDED} --drop 0.1 --steps 0", "--steps"),
        "empty layers": (f"{GUIDED} --drop 0.1 --min-per-layer 0", "--min-per-layer"),
        "a curve without texts": ("--curve a.png", "--curve needs texts"),
        "a curve of another kind": ("--curve a.gif --data texts.txt", "--curve draws .png, .svg, .pdf, not '.gif'"),
        "a curve and a share": ("--curve a.png --data texts.txt --drop 0.3", "--drop is for pruning"),
        "a curve and steps": ("--curve a.png --data texts.txt --steps 2", "--steps is for pruning"),
        "a curve and a model": ("--curve a.png --data texts.txt --output out", "--output is for pruning"),
        "a curve by magic": ("--curve a.png --data texts.txt --curve-methods random,magic", "'magic'"),
        "a curve by nothing": ("--curve a.png --data texts.txt --curve-methods ,", "--curve-methods names none"),
        "a picture that exists": ("--curve old.png --data texts.txt", "old.png exists"),
        "numbers that exist": ("--curve half.png --data texts.txt", "half.csv exists"),
    },
}
CASES = [(command, *case) for command, cases in BAD.items() for case in cases.values()]
NAMES = [f"{command}: {name}" for command, cases in BAD.items() for name in cases]


@pytest.mark.parametrize(("command", "arguments", "said"), CASES, ids=NAMES)
def test_bad_command_line(run, asked, command: str, arguments: str, said: str) -> None:
    code, out, err = run(command, *arguments.split())
    lines = err.splitlines()
    assert code == 2 and out == "" and len(lines) == 2, err
    assert lines[0].startswith("error: ") and said in lines[0] and lines[1].startswith("hint: ")
    assert asked == {} and not {"a.png", "out", "half.png"} & {path.name for path in Path().iterdir()}
