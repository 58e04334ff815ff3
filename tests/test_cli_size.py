"""`headscope size`: what is printed in each format, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import headscope
from headscope.cli.main import main
from headscope.errors import InputError
from headscope.views.size import bytes_text, count_text, render_size, size_table

ROOT = Path(__file__).parents[1]
GPT3 = ("--hidden-size", "12288", "--heads", "96", "--layers", "96", "--name", "GPT-3")
CONTRACT = [
    "name", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "qkv_params_per_layer",
    "o_params_per_layer", "attention_params", "total_params", "attention_share", "length", "attention_matrix_bytes",
    "kv_cache_bytes_per_token",
]  # fmt: skip


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `headscope size` with some arguments; gives exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["size", *arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def write_config(folder: Path, **values: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A directory with the config.json of BERT-Base and nothing else."""
    return write_config(tmp_path / "base", model_type="bert", architectures=["BertForMaskedLM"])


@pytest.fixture
def large(tmp_path: Path) -> str:
    """The same of BERT-Large."""
    return write_config(
        tmp_path / "large", model_type="bert", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096,
    )  # fmt: skip


def test_the_textbook_rows_in_one_table(run: Callable[..., Any], base: str, large: str) -> None:
    code, out, err = run(base, large, *GPT3)
    assert (code, err) == (0, "")
    parameters = [line.split() for line in out.split("\n\n")[0].splitlines()[2:]]
    assert parameters[0][1:11] == ["12", "12", "12", "64", "768", "1.77", "M", "590", "K", "28.3"]
    assert parameters[1][1:11] == ["24", "16", "16", "64", "1024", "3.15", "M", "1.05", "M", "101"]
    assert parameters[2][:10] == ["GPT-3", "96", "96", "96", "128", "12288", "453", "M", "151", "M"]
    sizes = out.split("\n\n")[1].splitlines()
    assert "144 GiB" in sizes[-1] and "1.50 GiB" in sizes[-1] and "16 MiB" in sizes[-1] and "9 MiB" in sizes[-1]


def test_json_has_the_keys_of_the_contract(run: Callable[..., Any], base: str) -> None:
    code, out, _err = run(base, *GPT3, "-f", "json")
    found = json.loads(out)
    assert code == 0 and found["schema"] == "headscope/size@1"
    for row in found["models"]:
        assert [key for key in CONTRACT if key not in row] == []
    bert, gpt = found["models"]
    assert (bert["total_params"], bert["kv_cache_bytes_per_token"]) == (109_514_298, None)
    assert (gpt["total_params"], gpt["attention_share"]) == (None, None)
    assert gpt["attention_matrix_bytes"] == 96 * 96 * 2048**2 * 4
    assert gpt["kv_cache_bytes_per_token"] == 96 * 2 * 12288 * 4
    assert found["versions"].keys() == {"headscope", "transformers", "torch", "python"}


def test_the_other_formats_hold_the_same_records(run: Callable[..., Any], base: str) -> None:
    records = json.loads(run(base, *GPT3, "-f", "json")[1])["models"]
    lines = run(base, *GPT3, "-f", "jsonl")[1].splitlines()
    assert [json.loads(line) for line in lines] == records
    rows = list(csv.DictReader(io.StringIO(run(base, *GPT3, "-f", "csv")[1])))
    for row, record in zip(rows, records, strict=True):
        assert row == {k: "" if v is None else str(v) for k, v in record.items() if k not in ("layers", "notes")}
    tables = [line for line in run(base, *GPT3, "-f", "markdown")[1].splitlines() if line.startswith("|")]
    assert len(tables) == 8 and "453 M" in tables[3]
    assert len({line.count("|") for line in tables[:4]}) == 1


def test_alone_it_sizes_the_default_model(run: Callable[..., Any], base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _err = run("-f", "json")
    assert code == 0 and [row["num_layers"] for row in json.loads(out)["models"]] == [6]
    monkeypatch.setenv("HEADSCOPE_MODEL", base)
    assert json.loads(run("-f", "json")[1])["models"][0]["name"] == base
    assert [row["name"] for row in json.loads(run(*GPT3, "-f", "json")[1])["models"]] == ["GPT-3"]
    assert json.loads(run("--model", base, "-f", "json")[1])["models"][0]["name"] == base


def test_length_dtype_and_batch_size(run: Callable[..., Any], base: str) -> None:
    plain = json.loads(run(base, "-f", "json", "--length", "100")[1])["models"][0]
    other = json.loads(run(base, "-f", "json", "--length", "200", "--dtype", "bfloat16", "--batch-size", "3")[1])
    assert plain["attention_matrix_bytes"] == 12 * 12 * 100**2 * 4
    assert other["models"][0]["attention_matrix_bytes"] == 12 * 12 * 200**2 * 2 * 3
    assert "3 × 200" in run(base, "--length", "200", "--batch-size", "3")[1]


def test_grouped_heads_and_widths_by_numbers(run: Callable[..., Any]) -> None:
    numbers = ("--hidden-size", "8192", "--heads", "64", "--layers", "80", "--kv-heads", "8", "--head-dim", "128")
    out = run(*numbers, "--intermediate-size", "28672", "--vocab-size", "128256", "-f", "json")[1]
    (row,) = json.loads(out)["models"]
    assert row["kv_cache_share"] == 0.125 and row["head_dim"] == 128
    assert row["total_params"] == row["attention_params"] + 80 * 2 * 8192 * 28672 + 128256 * 8192


def test_an_encoder_decoder_has_a_row_a_stack(run: Callable[..., Any], family_dir: Callable[[str], Path]) -> None:
    name = str(family_dir("t5"))
    code, out, _err = run(name)
    assert code == 0
    stacks = [line.split()[1] for line in out.split("\n\n")[0].splitlines()[2:]]
    assert stacks == ["encoder", "decoder", "cross"]
    assert "cross: the cache of cross-attention holds the other sequence" in out


@pytest.mark.parametrize("width", [30, 60, 100])
def test_no_column_is_lost_in_a_narrow_terminal(width: int) -> None:
    result = headscope.size(hidden_size=12288, num_heads=96, num_layers=96, name="GPT-3")
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(size_table(result))
    shown = out.getvalue()
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    for cell in ("453 M", "151 M", "58.0 B", "144 GiB", "9 MiB", "18 GiB", "float32"):
        assert cell in shown
    assert "share" not in shown.split("weights without")[0]  # nothing to tell in that column


def test_names_cannot_steer_the_terminal_or_the_spreadsheet(run: Callable[..., Any]) -> None:
    hostile = "=cmd()|\x1b[31m\n<b>"
    numbers = ("--hidden-size", "8", "--heads", "2", "--layers", "1", "--name", hostile)
    for name in ("table", "markdown", "csv"):
        out = run(*numbers, "-f", name)[1]
        assert "\x1b" not in out and "<b>" not in out if name == "markdown" else "\x1b" not in out
    (row,) = csv.DictReader(io.StringIO(run(*numbers, "-f", "csv")[1]))
    assert row["name"].startswith("'=")


def test_a_file_is_written_whole_and_not_over_another(run: Callable[..., Any], base: str, tmp_path: Path) -> None:
    target = tmp_path / "sizes.csv"
    assert run(base, "-o", str(target))[:2] == (0, "")
    assert target.read_text().startswith("name,stack,")
    code, out, err = run(base, "-o", str(target))
    assert (code, out) == (2, "") and "exists" in err
    assert run(base, "-o", str(target), "--force", "-f", "json")[0] == 0
    assert json.loads(target.read_text())["models"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--heads", "3"], 2, "needs hidden_size, num_layers"),
        (["--heads", "0"], 2, "--heads"),
        (["--length", "0"], 2, "--length"),
        (["--hidden-size", "9", "--heads", "2", "--layers", "1"], 2, "shared out among 2 heads"),
        (["--dtype", "int8"], 2, "not a floating-point dtype"),
        (["-f", "yaml"], 2, "unknown format"),
        (["-o", "sizes.xyz"], 2, "names no format"),
        (["./nowhere"], 3, "no model at ./nowhere"),
        (["nobody/nothing"], 3, "nobody/nothing"),
    ],
)
def test_what_is_refused(run: Callable[..., Any], arguments: list[str], code: int, words: str) -> None:
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert err.startswith("error: ") and words in err and "hint: " in err and "Traceback" not in err


def test_models_without_attention_are_refused(run: Callable[..., Any], family_dir: Callable[[str], Path]) -> None:
    code, out, err = run(str(family_dir("mamba")))
    assert (code, out) == (3, "") and "no attention heads" in err


def test_help_needs_no_model_library() -> None:
    script = (
        "import sys\ntry:\n    from headscope.cli.main import main; main(['size', '--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()" and "--kv-heads" in done.stdout


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (999, "999"), (1000, "1.00 K"), (589_824, "590 K"), (999_499, "999 K"), (999_500, "1.00 M"),
     (1_769_472, "1.77 M"), (150_994_944, "151 M"), (174_563_733_504, "175 B"), (10**15, "1000 T"), (None, "-")],
)  # fmt: skip
def test_numbers_have_three_digits(value: int | None, shown: str) -> None:
    assert count_text(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.50 KiB"), (2**33, "8 GiB"), (2**50 - 1, "1.00 PiB"),
     (70_000, "68.4 KiB"), (None, "-")],
)  # fmt: skip
def test_bytes_have_three_digits(value: int | None, shown: str) -> None:
    assert bytes_text(value) == shown


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError, match="unknown format"):
        render_size(headscope.size(hidden_size=8, num_heads=2, num_layers=1), "yaml")
