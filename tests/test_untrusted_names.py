"""Names, tokens, labels and texts from somebody who means harm stay text in everything that commands write."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headscope.cli.main import main
from tests.tiny_checkpoints import save

MARKUP = "<script>alert(1)<\\script><img src=x onerror=alert(1)>"
TERMINAL = "\x1b]0;owned\x07\x1b[31m\x9b2J\x08\u202e\u2028\u200b"
NAME = f"=cmd()|[red][link=https:x]$\\frac{{`{TERMINAL}\t{MARKUP}"
PIECES = (
    *("[PAD]", "[UNK]", "=1+1", "+1", "-1", "@sum", "\t=1", "\r", MARKUP, TERMINAL, "[bold]", "[/]", "$\\frac{", "$$"),
    *(
        "|",
        "`",
        "](javascript:alert(1))",
        "</td>",
        "\n# head",
        "\u2029",
        "\ufeff",
        "'",
        '"',
        "\\",
        "--><a>",
        "word",
        "The",
        "Heads",
    ),
)
IDS = " ".join(map(str, range(2, len(PIECES))))
RULES = """
name = {name}
otherwise = {other}
[[rule]]
label = {label}
metric = "sink"
above = -1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of this name whose tokens are such, and rules whose labels are."""
    folder = tmp_path_factory.mktemp("names")
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save(folder / NAME, "bert", PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]"))
    said = {"name": json.dumps("=r[red]" + NAME), "other": json.dumps("@o$_{" + NAME), "label": json.dumps(NAME)}
    (folder / "rules.toml").write_text(RULES.format(**said), "utf-8")
    (folder / "words.txt").write_text(f"word {MARKUP} =1+1 word\nword {TERMINAL} word\n", "utf-8")
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "")
    for name in (NAME, "rules.toml", "words.txt"):
        (tmp_path / name).symlink_to(folder / name)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """The exit code, and what a command writes to standard output and standard error."""
    with pytest.raises(SystemExit) as left:
        main(argv)
    return int(left.value.code or 0), *capsys.readouterr()


def is_plain(text: str) -> bool:
    """Whether nothing in it steers a terminal or hides."""
    return not any(c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)


def check_csv(text: str) -> None:
    rows = list(csv.reader(io.StringIO(text)))
    assert len(rows) > 1 and len({len(row) for row in rows}) == 1
    for cell in (cell for row in rows for cell in row):
        assert not cell.lstrip().startswith(("=", "+", "@", "\t", "\r"))
        if cell.lstrip().startswith("-"):
            float(cell)


def check_markdown(text: str) -> None:
    assert "<" not in text.replace("&lt;", "")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    for line, following in pairwise(tables):
        if set(following) <= set("|-: "):
            assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", following))
    assert not re.search(r"(?<!\\)[`$]|(?<!\\)\]\(", text)


CHECKS = {"csv": check_csv, "markdown": check_markdown, "json": json.loads, "table": len}
COMMANDS: dict[str, Sequence[str]] = {
    "analyze": ["analyze", "-m", NAME, "--ids", IDS, "--rules", "rules.toml"],
    "analyze a corpus": ["analyze", "-m", NAME, "--data", "words.txt", "--rules", "rules.toml"],
    "verify": ["verify", "-m", NAME],
    "importance": ["importance", "-m", NAME, "--data", "words.txt", "--method", "magnitude"],
    "prune": ["prune", "-m", NAME, "--heads", "0:1"],
    "compare": ["compare", NAME, NAME, "word word"],
    "size": ["size", NAME, "--name", NAME, "--hidden-size", "8", "--heads", "2", "--layers", "1"],
}


@pytest.mark.parametrize("form", CHECKS)
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_writes_them_as_text(kind: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *COMMANDS[kind], "-f", form)
    assert code == 0, err
    assert is_plain(out) and is_plain(err), (out, err)
    CHECKS[form](out)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("argv", [["report", "-o", "a.html"], ["analyze", "--html", "a.html", "-f", "json"]])
def test_a_page_holds_no_element_of_theirs(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *argv, "-m", NAME, "--ids", IDS, "--rules", "rules.toml")
    assert code == 0 and is_plain(out) and is_plain(err), err
    text = Path("a.html").read_text("utf-8")
    page = _Page()
    page.feed(text)
    assert {"map", "head"} <= {attributes.get("id") for _, attributes in page.found}
    assert "img" not in {tag for tag, _ in page.found}
    assert not [a for _, attributes in page.found for a in attributes if a.startswith("on")]
    assert not [a for _, a in page.found if str(a.get("href") or a.get("src") or "data:").split(":")[0] != "data"]
    body = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert is_plain(body)


def _hrefs(root: ElementTree.Element) -> list[str]:
    return [value for node in root.iter() for name, value in node.attrib.items() if name.endswith("href")]


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_a_picture_holds_no_element_of_theirs(suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "heatmap", "-m", NAME, "--ids", IDS, "-l", "0", "--head", "1", "-o", f"a.{suffix}")
    assert code == 0 and is_plain(out + err), err
    data = Path(f"a.{suffix}").read_bytes()
    assert b"\x1b]0" not in data
    if suffix == "svg":
        # Comments are left out, as they are by whoever shows it; theirs would have to end them.
        root = ElementTree.fromstring(data)
        assert not [name for node in root.iter() for name in node.attrib if name.startswith("on")]
        assert {node.tag.partition("}")[2] for node in root.iter()}.isdisjoint({"script", "a", "foreignObject"})


def test_pictures_of_heads_lie_in_their_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(
        capsys,
        "analyze",
        "-m",
        NAME,
        "--ids",
        IDS,
        "--rules",
        "rules.toml",
        "-l",
        "0,1",
        "--head",
        "3",
        "--heatmaps",
        "pictures",
    )
    assert code == 0 and is_plain(err), err
    names = {path.name for path in Path("pictures").iterdir()}
    assert {"map.png", "self.L0.png", "self.L1H3.png"} <= names
    assert all(re.fullmatch(r"[\w.-]+\.png", name) for name in names)


FAILING: dict[str, tuple[int, Sequence[str]]] = {
    "a layer": (2, ["analyze", "word", "-m", NAME, "-l", NAME]),
    "a layer that is not there": (2, ["analyze", "word", "-m", NAME, "-l", "9"]),
    "a model": (3, ["analyze", "word", "-m", f"./x{NAME}"]),
    "a tokenizer": (3, ["analyze", "word", "-m", NAME, "--tokenizer", f"./x{NAME}"]),
    "a file": (2, ["analyze", "--file", f"x{NAME}"]),
    "a corpus": (2, ["analyze", "--data", f"x{NAME}.txt"]),
    "a column": (2, ["analyze", "-m", NAME, "--data", f"x{NAME}.csv", "--text-column", NAME]),
    "rules": (2, ["analyze", "word", "-m", NAME, "--rules", f"x{NAME}.toml"]),
    "a metric": (2, ["analyze", "word", "-m", NAME, "--metrics", NAME]),
    "a stack": (2, ["analyze", "word", "-m", NAME, "--stack", NAME]),
    "an output": (2, ["analyze", "word", "-m", NAME, "-o", f"no{NAME}/a.json"]),
    "an option": (2, ["analyze", f"--{NAME}"]),
    "a command": (2, [NAME]),
    "heads": (2, ["prune", "-m", NAME, "--heads", NAME]),
    "a method": (2, ["importance", "-m", NAME, "--data", "words.txt", "--method", NAME]),
    "explain": (2, ["verify", "-m", NAME, "--explain", NAME]),
    "a curve": (2, ["report", "word", "-m", NAME, "-o", "a.html", "--curve", f"x{NAME}.csv"]),
}


@pytest.mark.parametrize("kind", FAILING)
def test_an_error_names_them_on_one_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, argv = FAILING[kind]
    code, out, err = run(capsys, *argv)
    assert (code, out) == (wanted, ""), err
    lines = err.splitlines()
    assert [line.partition(":")[0] for line in lines[-2:]] == ["error", "hint"], err
    assert is_plain(err)
