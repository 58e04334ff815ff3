"""Metrics and rules of other distributions: found, measured, shown and refused like our own."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import headscope
from headscope.cli.main import main
from headscope.corpus.command import analyze_corpus
from headscope.corpus.fingerprint import identity
from headscope.errors import InputError
from headscope.heads import plugins, registry
from headscope.heads.metrics import METRICS, chosen, metric, metric_names, variant
from headscope.heads.rules import load_rules
from headscope.models.quiet import quiet
from tests import corpus_samples as samples

ROOT = Path(__file__).parents[1]
TEXT = "the cat sat on the mat because it was tired"
OWN = tuple(METRICS)

CODE = """
    from pathlib import Path
    from headscope.heads.metrics import Rows, Target, metric, target_metric

    @target_metric()
    def two_back():
        return Target(offset=-2)

    @metric("high")
    def top_two(rows: Rows):
        return rows.from_weights(lambda block: block.weights.topk(2).values.sum(dim=-1)), rows.valid

    @metric("high")
    def unlisted(rows: Rows):
        return rows.largest(), rows.valid

    TEXT = '''
    otherwise = "other"
    [[rule]]
    label = "skips"
    metric = "two_back_adjusted"
    above = -1
    '''
    FILE = Path(__file__).with_name("skips.toml")

    def function():
        return FILE
"""
ENTRIES = """
    [headscope.metrics]
    two_back = two_back_heads:two_back
    top_two = two_back_heads:top_two
    [headscope.rules]
    skips = two_back_heads:TEXT
    skips-file = two_back_heads:FILE
    skips-function = two_back_heads:function
"""


def install(folder: Path, distribution: str, entries: str, code: str | None = None, version: str = "1.0") -> None:
    """A distribution as an installer leaves it: metadata, entry points and a module."""
    stem = distribution.replace("-", "_")
    info = folder / f"{stem}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", "utf-8")
    (info / "entry_points.txt").write_text(textwrap.dedent(entries), "utf-8")
    if code is not None:
        (folder / f"{stem}.py").write_text(textwrap.dedent(code), "utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is on the path; what its modules register goes at the end."""
    folder = tmp_path / "site"
    folder.mkdir()
    modules, kept, decorated = set(sys.modules), dict(METRICS), dict(registry.DECORATED)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for table, before in ((METRICS, kept), (registry.DECORATED, decorated)):
        table.clear()
        table.update(before)
    for name in set(sys.modules) - modules:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def two_back(site: Path) -> Path:
    """Where `two-back-heads` is installed."""
    install(site, "two-back-heads", ENTRIES, CODE)
    rules = '[[rule]]\nlabel = "skips"\nmetric = "top_two"\nabove = 0.0\n'
    (site / "skips.toml").write_text(rules, "utf-8")
    return site


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.model(tmp_path_factory.mktemp("model"))


def attention(model: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Plain attention of TEXT, (layer, head, row, key)."""
    with quiet(), torch.no_grad():
        loaded = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
        inputs = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt")
        return torch.cat(loaded(**inputs, output_attentions=True).attentions).double().numpy()


def expected(weights: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """The metrics of one head, (row, key), in which every row sees every key."""
    n = len(weights)
    back = np.mean([weights[i, i - 2] for i in range(2, n)])
    rest = weights[:, 1:] / weights[:, 1:].sum(-1, keepdims=True)
    return {
        "two_back": back,
        "two_back_adjusted": (back - 1 / n) / (1 - 1 / n),
        "two_back_rest": np.mean([rest[i, i - 3] for i in range(3, n)]),
        "two_back_adjusted_rest": (np.mean([rest[i, i - 3] for i in range(3, n)]) - 1 / (n - 1)) / (1 - 1 / (n - 1)),
        "top_two": np.sort(weights, -1)[:, -2:].sum(-1).mean(),
        "top_two_rest": np.sort(rest, -1)[:, -2:].sum(-1).mean(),
    }


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["analyze", *arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def command(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(site)])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "TERM": "dumb"}
    script = [sys.executable, "-c", "from headscope.cli.main import main; main()", "analyze", *arguments]
    return subprocess.run(script, env=environment, capture_output=True, encoding="utf-8", timeout=300)


# ------------------------------------------------------------------ measured
@pytest.mark.parametrize("engine", ["streaming", "layerwise"])
def test_values_and_chance_equal_plain_numpy(two_back: Path, model: Path, engine: str) -> None:
    weights = attention(model)
    n, names = weights.shape[-1], expected(weights[0, 0])
    found = headscope.analyze(str(model), TEXT, metrics=",".join(names), engine=engine)
    for head in found.heads:
        for name, value in expected(weights[head.layer, head.head]).items():
            assert head.metrics[name] == pytest.approx(value, abs=1e-5)
        assert head.chance["two_back"] == pytest.approx(1 / n)
        assert head.chance["top_two"] == pytest.approx(2 / n)
        assert head.chance["top_two_rest"] == pytest.approx(2 / (n - 1))
        back = head.metrics["two_back"]
        assert back is not None and ("two_back" in head.at_chance) == (back <= (1 + 5e-3) / n + 1e-6)
    assert found.versions["two-back-heads"] == "1.0"
    assert found.warnings == ()


def test_all_names_them_in_one_order_whatever_came_before(two_back: Path) -> None:
    assert chosen("two_back") == ("two_back",)
    names = metric_names()
    assert chosen("all") == names
    assert [n for n in names if "two" in n and n in METRICS] == ["top_two", "two_back"]
    assert {"two_back_adjusted", "two_back_adjusted_rest", "top_two_rest"} <= set(names)
    assert "unlisted" not in METRICS, "only what an entry point names counts"
    assert "top_two_adjusted" not in names
    for name in names:
        assert variant(name).name == name
    with pytest.raises(InputError, match="unknown metric 'top_two_adjusted'") as error:
        variant("top_two_adjusted")
    assert (error.value.hint or "").count("two_back (") == (error.value.hint or "").count("two_back") == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_load_them_as_well(two_back: Path, model: Path, workers: int) -> None:
    texts = [*samples.texts(12, longest=12), TEXT]
    options: dict[str, Any] = {"metrics": "two_back", "rules": "skips", "partition": (4, 10_000)}
    found = analyze_corpus(str(model), texts, workers=workers, **options)
    assert {head.pattern for head in found.heads} == {"skips"}
    assert found.versions["two-back-heads"] == "1.0"
    singles = [headscope.analyze(str(model), text, metrics="two_back") for text in texts]
    for i, head in enumerate(found.heads):
        values = [one.heads[i].metrics["two_back"] for one in singles]
        assert head.metrics["two_back"] == pytest.approx(np.mean([v for v in values if v is not None]), abs=1e-6)


def test_another_version_is_another_run(two_back: Path, model: Path) -> None:
    job = samples.job(model)
    with_it = identity(job.__class__(**{**vars(job), "names": ("two_back_rest",)}), None, {})
    assert with_it["versions"]["two-back-heads"] == "1.0"
    assert "two-back-heads" not in identity(job, None, {})["versions"]


# ------------------------------------------------------------------ shown
def test_tables_json_and_csv_show_them(two_back: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = expected(attention(model)[1, 2])["two_back"]
    given = (TEXT, "--model", str(model), "--layer", "1", "--metrics", "sink,two_back")
    code, out, _ = run(capsys, *given, "--format", "json")
    head = json.loads(out)["heads"][2]
    assert code == 0 and head["metrics"]["two_back"] == pytest.approx(value, abs=1e-5)
    code, out, _ = run(capsys, *given, "--format", "csv")
    row = list(csv.DictReader(out.splitlines()))[2]
    assert code == 0 and float(row["two_back"]) == pytest.approx(value, abs=1e-5)
    code, out, _ = run(capsys, *given)
    assert code == 0 and "two_back" in " ".join(out.split()).replace("_ ", "_")
    assert f"{value:.3f}" in out


def test_the_command_in_a_fresh_process(two_back: Path, model: Path) -> None:
    done = command(
        two_back, TEXT, "--model", str(model), "--metrics", "two_back", "--rules", "skips", "--format", "json"
    )
    assert done.returncode == 0, done.stderr
    weights, found = attention(model), json.loads(done.stdout)
    for head in found["heads"]:
        value = expected(weights[head["layer"], head["head"]])["two_back"]
        assert head["metrics"]["two_back"] == pytest.approx(value, abs=1e-5)
        assert head["pattern"] == "skips"
    assert found["rules"] == {"name": "skips", "thresholds": {"two_back_adjusted": -1}}


def test_help_lists_names_from_metadata_alone(site: Path) -> None:
    entries = (
        "[headscope.metrics]\nmine = nowhere:mine\nsink = nowhere:sink\n[headscope.rules]\nhouse = nowhere:house\n"
    )
    install(site, "not-there", entries)
    script = (
        "import sys\nimport headscope\nfrom headscope.cli.main import main\ntry:\n    main(['analyze', '--help'])\n"
        "except SystemExit:\n    print(*{m.partition('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    path = os.pathsep.join([str(ROOT), str(site)])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    words = " ".join(done.stdout.replace("│", " ").split())
    assert "core, all or names with commas. Installed: mine (not-there)." in words
    assert "calibrated or a .toml file. Installed: house (not-there)." in words
    assert {"torch", "transformers", "nowhere"} & set(done.stderr.split()) == set()


def test_without_any_nothing_is_said() -> None:
    if not plugins.installed(plugins.METRICS).plugins:
        assert plugins.help_text(plugins.METRICS) == ""
    assert set(plugins._own(plugins.METRICS)) == {"core", "all", *OWN}


def test_errors_list_names_without_importing(site: Path) -> None:
    install(site, "not-there", "[headscope.metrics]\nmine = nowhere:mine\n[headscope.rules]\nhouse = nowhere:house\n")
    with pytest.raises(InputError) as error:
        variant("thine")
    assert (error.value.hint or "").endswith("; installed: mine (not-there).")
    with pytest.raises(InputError) as error:
        chosen(",")
    assert (error.value.hint or "").startswith("Known metrics: sink, prev_token, ")
    assert (error.value.hint or "").count(" mine") == 1
    with pytest.raises(InputError) as error:
        load_rules("horse")
    assert error.value.hint == "Use seed, calibrated, house (not-there) or the path of a .toml file."


# ------------------------------------------------------------------ rules
@pytest.mark.parametrize("name", ["skips", "skips-file", "skips-function"])
def test_rules_by_name(two_back: Path, name: str) -> None:
    rules = load_rules(name)
    assert rules.name == name and rules.labels[0] == "skips"
    assert rules.without_sink().metrics == ("two_back_adjusted_rest",) if name == "skips" else ("top_two_rest",)


BAD_RULES = {
    "5": "is a int",
    "'no toml'": "rules file 'house (bad-rules)' is not valid TOML",
    '\'[[rule]]\\nlabel = "a"\\nmetric = "b"\\nabove = 1\'': "(bad-rules)': rule 1: unknown metric 'b'",
    "lambda: 1 / 0": "cannot be loaded: ZeroDivisionError: division by zero",
    "__import__('pathlib').Path('missing.toml')": "cannot be loaded: FileNotFoundError",
}


@pytest.mark.parametrize(("value", "said"), BAD_RULES.items(), ids=range(len(BAD_RULES)))
def test_rules_that_are_none(site: Path, value: str, said: str) -> None:
    install(site, "bad-rules", "[headscope.rules]\nhouse = bad_rules:house\n", f"house = {value}\n")
    with pytest.raises(InputError) as error:
        load_rules("house")
    assert said in error.value.message and "bad-rules" in error.value.message


# ------------------------------------------------------------------ broken ones
BROKEN = {
    "import": ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
    "lines": ("raise ValueError('first\\nsecond')", "cannot be loaded: ValueError: first"),
    "exit": ("raise SystemExit", "cannot be loaded: SystemExit"),
    "missing": ("", "cannot be loaded: AttributeError: "),
    "plain": ("def mine(rows): ...", "is not a function under @metric or @target_metric"),
    "name": (
        "from headscope.heads.metrics import metric\n@metric('high')\ndef other(rows): ...\nmine = other",
        "is called 'other' in its module",
    ),
    "target": (
        "from headscope.heads.metrics import target_metric\n@target_metric()\ndef mine(): return -2",
        "cannot be loaded: InputError: the metric 'mine' returns a int, not a Target",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_one_is_an_error_only_when_asked_for(two_back: Path, kind: str) -> None:
    code, said = BROKEN[kind]
    install(two_back, "broken-heads", "[headscope.metrics]\nmine = broken_heads:mine\n", code)
    before = dict(METRICS)
    assert chosen("core") and chosen("sink,two_back")
    with pytest.raises(InputError) as error:
        chosen("sink,mine_rest")
    assert "'broken-heads'" in error.value.message and said in error.value.message and error.value.hint
    assert "\n" not in error.value.message
    assert "two_back" in chosen("all") and "mine" not in chosen("all")
    assert set(METRICS) - set(before) == {"two_back", "top_two"}


def test_all_warns_and_goes_on(two_back: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(two_back, "broken-heads", "[headscope.metrics]\nmine = broken_heads:mine\n", BROKEN["import"][0])
    said = "the metric 'mine' of the distribution 'broken-heads' cannot be loaded: " + BROKEN["import"][1]
    given = (TEXT, "--model", str(model), "--format", "json")
    code, out, err = run(capsys, *given, "--metrics", "all")
    assert code == 0 and f"warning: {said}" in err
    assert "two_back" in json.loads(out)["heads"][0]["metrics"] and json.loads(out)["warnings"] == [said]
    assert analyze_corpus(str(model), [TEXT, TEXT], metrics="all").warnings.count(said) == 1
    code, out, err = run(capsys, *given, "--metrics", "mine")
    assert (code, out) == (2, "") and f"error: {said}" in err and "hint: " in err
    code, _, err = run(capsys, *given)
    assert code == 0 and "broken-heads" not in err


SHAPES = {
    "rows.largest().mean(dim=1), rows.valid": "values of shape",
    "rows.largest()[..., :1], rows.valid": "values of shape",
    "rows.largest(), rows.valid.float()": "eligible rows as torch.float32",
    "rows.largest(), rows.valid[..., :2]": "eligible rows as torch.bool of shape",
}


@pytest.mark.parametrize(("given", "said"), SHAPES.items())
def test_values_that_would_be_broadcast_are_refused(site: Path, model: Path, given: str, said: str) -> None:
    code = f"from headscope.heads.metrics import metric\n@metric('high')\ndef mine(rows):\n    return {given}\n"
    install(site, "wrong-heads", "[headscope.metrics]\nmine = wrong_heads:mine\n", code)
    with pytest.raises(headscope.HeadscopeError, match="the metric 'mine' of wrong_heads gives " + said):
        headscope.analyze(str(model), TEXT, metrics="mine")


# ------------------------------------------------------------------ clashes
def test_own_names_win(site: Path, model: Path) -> None:
    code = """
        from headscope.heads.metrics import Target, target_metric
        @target_metric()
        def sink():
            return Target(offset=-1)
        seed = "nothing"
    """
    entries = "[headscope.metrics]\nsink = other_sink:sink\n[headscope.rules]\nseed = other_sink:seed\n"
    install(site, "other-sink", entries, code)
    found = headscope.analyze(str(model), TEXT)
    plain = attention(model)
    assert found.heads[0].metrics["sink"] == pytest.approx(plain[0, 0, :, 0].mean(), abs=1e-5)
    assert found.rules.name == "seed" and "other_sink" not in sys.modules
    assert found.warnings == (
        "the rule set 'seed' of the distribution 'other-sink' is not used: headscope has its own",
        "the metric 'sink' of the distribution 'other-sink' is not used: headscope has its own",
    )
    assert headscope.analyze(str(model), TEXT, metrics="entropy", rules="calibrated").warnings == found.warnings[1:]


def test_the_first_of_two_wins_by_name(site: Path, model: Path) -> None:
    for name, offset in (("zebra", -1), ("Aardvark", -2), ("marmot", -3)):
        code = f"from headscope.heads.metrics import *\n@target_metric()\ndef mine(): return Target(offset={offset})\n"
        install(site, name, f"[headscope.metrics]\nmine = {name}:mine\n", code)
    found = headscope.analyze(str(model), TEXT, metrics="mine")
    weights = attention(model)[0, 0]
    assert found.heads[0].metrics["mine"] == pytest.approx(np.diagonal(weights, -2).mean(), abs=1e-5)
    assert found.warnings == tuple(
        f"the metric 'mine' of the distribution {name!r} is not used: the distribution 'Aardvark' comes first"
        for name in ("marmot", "zebra")
    )
    assert headscope.analyze(str(model), TEXT).warnings == ()


def test_names_that_would_mean_something_else(site: Path) -> None:
    names = ("all", "core", "x_rest", "x_adjusted", "a-b")
    entries = "".join(f"{name} = odd_names:x\n" for name in names)
    install(site, "odd-names", f"[headscope.metrics]\n{entries}[headscope.rules]\nx.toml = odd_names:x\n")
    assert plugins.installed(plugins.METRICS).plugins == plugins.installed(plugins.RULES).plugins == {}
    assert len(plugins.warnings(plugins.METRICS)) == 5 and len(plugins.warnings(plugins.RULES)) == 1


def named(name: str, decorator: Callable[..., Any], home: str) -> None:
    def function(rows: Any) -> Any: ...

    function.__name__, function.__module__ = name, home
    decorator(function)


def test_the_decorators_keep_names_apart(site: Path) -> None:
    for name in ("core", "all", "x_rest", "an_adjusted_x"):
        with pytest.raises(InputError, match="a metric cannot be called"):
            named(name, metric("high"), "a_notebook")
    ours = METRICS["sink"]
    with pytest.warns(UserWarning, match="'sink' of a_notebook is not used: headscope.heads.metrics has one") as said:
        named("sink", metric("high"), "a_notebook")
    decorating = named.__code__.co_firstlineno + 4
    assert (said[0].filename, said[0].lineno) == (__file__, decorating), "where the metric is decorated"
    assert METRICS["sink"] is ours
    named("fresh", metric("high"), "a_notebook")
    first = METRICS["fresh"]
    named("fresh", metric("low"), "a_notebook")
    assert METRICS["fresh"] is not first and METRICS["fresh"].direction == "low", "a cell that is run again"
    assert "fresh_rest" in metric_names()
    named("sinkhole", metric("low"), "a_notebook")
    assert "sinkhole_rest" in metric_names()
