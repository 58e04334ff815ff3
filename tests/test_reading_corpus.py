"""What a corpus can be: files, directories, patterns, standard input, datasets, texts in memory."""

from __future__ import annotations

import csv
import gc
import io
import json
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest

from headscope.errors import InputError, ResourceError
from headscope.importance.examples import Examples, read_examples
from headscope.reading import Record, Skipped, open_corpus
from headscope.reading import sources as sources_module
from headscope.reading.formats import FORMATS, reads
from headscope.reading.records import Item

ROOT = Path(__file__).parents[1]


def texts(data, **options) -> list[str]:
    """The texts, which a second reading has to give again."""
    corpus = open_corpus(data, **options)
    first = list(corpus.records())
    assert list(corpus.records()) == first
    return [r.text for r in first]


# ------------------------------------------------------------------ files
@pytest.fixture
def tree(tmp_path):
    """Files that are texts and files that are not, in several directories."""
    for name, text in {
        "b.txt": "b",
        "a.jsonl": '{"text": "a"}',
        "a-b/z.csv": "text\na-b z\n",
        "a/10.txt": "a 10",
        "a/9.txt": "a 9",
        "a/empty.txt": "",
        "a/.hidden.txt": "hidden",
        ".cache/x.txt": "hidden",
        "README.md": "no format",
        "a/LICENSE": "no suffix",
        "C.TXT": "upper",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    return tmp_path


def test_directories_are_read_in_the_order_of_paths(tree) -> None:
    assert texts(tree) == ["upper", "a 10", "a 9", "a-b z", "a", "b"]
    records = list(open_corpus(str(tree)).records())
    assert [r.number for r in records] == list(range(6))
    assert records[3] == Record(3, "a-b z", None, f"{tree}/a-b/z.csv:2")


def test_patterns_are_read_in_the_order_of_paths(tree, monkeypatch) -> None:
    monkeypatch.chdir(tree)
    assert texts("*/*.txt") == ["a 10", "a 9", "b"]
    assert texts("**/*.txt") == texts(f"{tree}/**/*.txt") == ["a 10", "a 9", "b"]
    assert texts("**") == texts(tree)
    assert texts(".cache/*.txt") == texts("a/.*.txt") == ["hidden"]
    assert texts("[ab].*") == ["a", "b"]
    corpus = open_corpus("a/?.txt")
    assert (corpus.name, next(corpus.records()).where) == ("a/?.txt", "a/9.txt:1")
    (tree / "x[1].txt").write_text("not a pattern")
    assert texts(Path("x[1].txt")) == ["not a pattern"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", "cannot read none.txt: No such file"),
        ("./none/none", "cannot read|not a file"),
        ("/none/none", "cannot read /none/none: No such file"),
        ("no*.txt", r"no file that no\*.txt matches"),
        ("a**b.txt", "cannot read|no file"),
        ("*.md", "has a known suffix"),
        ("README.md", "unknown suffix '.md'"),
        ("a/LICENSE", "unknown suffix ''"),
        (".cache/..", None),
        ("docs", "no file in docs has a known suffix"),
        ("broken.txt", "cannot read broken.txt: No such file"),
        ("pipe.txt", "it is no file"),
        ("a.parquet.gz", "unknown suffix"),
        ("x" * 5000, "not a file|too long"),
        ("nul\0.txt", "cannot read"),
        (7, "int is no sequence of texts"),
        (None, "NoneType is no sequence"),
        (b"bytes", "bytes is no sequence"),
        ({"text": ["a"]}, "dict is no sequence"),
    ],
)
def test_what_is_not_there_is_refused_when_opened(name, message, tree, monkeypatch) -> None:
    monkeypatch.chdir(tree)
    (tree / "docs").mkdir()
    (tree / "broken.txt").symlink_to("nowhere")
    (tree / "a.parquet.gz").write_bytes(b"")
    os.mkfifo(tree / "pipe.txt")
    if message is None:
        (tree / "broken.txt").unlink()
        (tree / "pipe.txt").unlink()
        assert len(texts(name)) == 6
        return
    with pytest.raises(InputError, match=message) as raised:
        open_corpus(name)
    assert raised.value.hint


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("a")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(io, "FileIO", refuse)
    with pytest.raises(InputError, match=r"cannot read .*a\.txt: Permission denied"):
        open_corpus(tmp_path / "a.txt")


def test_one_bad_file_among_many_is_found_when_opened(tree) -> None:
    (tree / "z.csv").write_text("title\nx\n")
    with pytest.raises(InputError, match=r"z\.csv has no column 'text'"):
        open_corpus(tree)


def test_nothing_in_it_is_told_at_the_end(tmp_path) -> None:
    for name, content, hint in (
        ("a.txt", "\n \n", "one text a line"),
        ("a.jsonl", "x\ny", r"2 of 2 texts .*a\.jsonl:1"),
    ):
        (tmp_path / name).write_text(content)
        corpus = open_corpus(tmp_path / name)
        with pytest.raises(InputError, match="there is no text in") as raised:
            list(corpus.records())
        assert re.search(hint, raised.value.hint)


def test_the_share_that_is_read_grows_to_one(tmp_path) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("".join(f"{name} {i} {'x' * 100}\n" for i in range(3_000)))
    corpus = open_corpus(tmp_path)
    assert corpus.share() == 0
    shares = [corpus.share() for _ in corpus.records()]
    assert shares == sorted(shares) and corpus.share() == 1
    # Files are read ahead in pieces of 64 KB.
    slack = (1 << 16) / (3 * 3_000 * 105)
    for i in (1_500, 4_500, 7_500):
        assert i / 9_000 - 0.01 < shares[i] < i / 9_000 + slack + 0.01
    examples = open_corpus(["a", "b", "c", "d"])
    assert [examples.share() for _ in examples.records()] == [0.25, 0.5, 0.75, 1]
    assert open_corpus(x for x in "ab").share() == 0


def test_a_format_is_one_function(tmp_path) -> None:
    @reads(".shout")
    def read_shouting(file):
        for line in file.binary:
            yield Item(file.at(1), line.decode().upper())

    try:
        (tmp_path / "a.shout").write_text("hello")
        assert texts(tmp_path) == ["HELLO"]
    finally:
        del FORMATS[".shout"]


def test_readers_may_be_interleaved_and_left(tree) -> None:
    corpus = open_corpus(tree)
    first, second = corpus.records(), corpus.records()
    pairs = [(next(first).text, next(second).text) for _ in range(4)]
    assert all(a == b for a, b in pairs)
    first.close()
    assert [r.text for r in second] == ["a", "b"]
    assert [r.text for r in pickle.loads(pickle.dumps(corpus)).records()] == texts(tree)


# ------------------------------------------------------------------ standard input
def give_stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_standard_input_can_be_read_again(monkeypatch) -> None:
    give_stdin(monkeypatch, "one\n\ntwo ü\u2028\r\ncaf\xe9".encode() + b"\n\xff\n")
    corpus = open_corpus("-")
    skipped = Skipped()
    expected = [(0, "one", "stdin:1"), (1, "two ü\u2028", "stdin:3"), (2, "café", "stdin:4")]
    for tally in (skipped, None):
        assert [(r.number, r.text, r.where) for r in corpus.records(tally)] == expected
    assert skipped.first == [("stdin:5", "is not UTF-8 (byte 0)")]
    first, second = corpus.records(), corpus.records()
    assert [next(first), next(second), next(first), next(second)] == [r for r in corpus.records() for _ in "12"][:4]
    assert corpus.name == "standard input" and 0 <= corpus.share() <= 1


def test_json_lines_on_standard_input(monkeypatch) -> None:
    give_stdin(monkeypatch, b'\n{"body": "one", "label": 3}\n{"body": "two"}\n')
    records = list(open_corpus("-", text_column="body").records())
    assert [(r.text, r.label, r.where) for r in records] == [("one", 3, "stdin:2"), ("two", None, "stdin:3")]
    give_stdin(monkeypatch, b"{braces}\n")
    assert texts("-") == ["{braces}"]


def test_the_copy_of_standard_input_goes(monkeypatch, tmp_path) -> None:
    made = []
    make = sources_module.tempfile.TemporaryFile

    def remembered():
        made.append(make(dir=tmp_path))
        return made[-1]

    monkeypatch.setattr(sources_module.tempfile, "TemporaryFile", remembered)
    give_stdin(monkeypatch, b"x" * 3_000_000)
    corpus = open_corpus("-")
    assert len(next(corpus.records()).text) == 3_000_000 and not made[0].closed
    del corpus
    gc.collect()
    assert made[0].closed and list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(monkeypatch) -> None:
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sources_module.tempfile, "TemporaryFile", Full)
    give_stdin(monkeypatch, b"x")
    with pytest.raises(ResourceError, match="no room on disk"):
        open_corpus("-")


def test_a_pipe_into_a_process() -> None:
    code = "from headscope.reading import open_corpus; print(*[r.text for r in open_corpus('-').records()], sep='|')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, input="a\nb\n", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a|b\n", "")


# ------------------------------------------------------------------ datasets
@pytest.fixture(scope="module")
def saved_datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    classes = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    train = datasets.Dataset.from_dict({"text": ["one", "", "three"], "label": [0, 1, 1]}, features=classes)
    train.save_to_disk(root / "one")
    test = datasets.Dataset.from_dict({"text": ["four"], "label": [0]}, features=classes)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(root / "two")
    datasets.DatasetDict({"only": test}).save_to_disk(root / "only")
    datasets.Dataset.from_dict({"text": [1], "title": ["a"]}).save_to_disk(root / "numbers")
    return root


def test_saved_datasets_are_read(saved_datasets) -> None:
    path, skipped = saved_datasets / "one", Skipped()
    corpus = open_corpus(path)
    assert list(corpus.records(skipped)) == [
        Record(0, "one", 0, f"{path}:row 0"),
        Record(2, "three", 1, f"{path}:row 2"),
    ]
    assert skipped.first == [(f"{path}:row 1", "has no text")] and corpus.share() == 1
    path = saved_datasets / "two"
    assert [r.where for r in open_corpus(str(path), split="train").records()] == [f"{path} train:0", f"{path} train:2"]
    assert texts(path, split="test") == texts(saved_datasets / "only") == ["four"]
    assert texts(saved_datasets / "numbers", text_column="title") == ["a"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("two", {}, "has the splits train, test"),
        ("two", {"split": "dev"}, "no split 'dev': there are train, test"),
        ("one", {"split": "dev"}, "without a split 'dev'"),
        ("numbers", {}, "has int64 in column text, not texts"),
        ("one", {"text_column": "body"}, "no column 'body': its columns are text, label"),
        ("one", {"label_column": "class"}, "no column 'class'"),
    ],
)
def test_saved_datasets_are_checked_when_opened(name, options, message, saved_datasets) -> None:
    with pytest.raises(InputError, match=message) as raised:
        open_corpus(saved_datasets / name, **options)
    assert "--" in raised.value.hint


def test_a_damaged_dataset(saved_datasets, tmp_path) -> None:
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{")
    with pytest.raises(InputError, match="cannot load"):
        open_corpus(tmp_path)


def test_datasets_of_the_hub_are_streamed(monkeypatch) -> None:
    asked = []

    def load_dataset(name, *, split, streaming):
        asked.append((name, split, streaming))

        def rows():
            yield {"text": "one", "id": 1}
            yield {"text": None, "id": 2}
            yield {"text": "three", "id": 3}

        features = datasets.Features({"text": datasets.Value("string"), "id": datasets.Value("int64")})
        return datasets.IterableDataset.from_generator(rows, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = open_corpus("org/some-name")
    expected = [Record(0, "one", None, "org/some-name train:0"), Record(2, "three", None, "org/some-name train:2")]
    assert list(corpus.records()) == list(corpus.records()) == expected
    assert corpus.share() is None and corpus.name == "org/some-name"
    assert texts("name", split="test") == ["one", "three"]
    assert asked == [("org/some-name", "train", True), ("name", "test", True)]
    with pytest.raises(InputError, match="no column 'body': its columns are text, id"):
        open_corpus("name", text_column="body")


def test_a_stream_that_breaks_is_told(monkeypatch) -> None:
    class Broken:
        features = None

        def __iter__(self):
            yield {"text": "one"}
            raise TimeoutError("the connection\nwas lost")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Broken())
    records = open_corpus("org/name").records()
    assert next(records).text == "one"
    with pytest.raises(InputError, match=r"cannot read on in org/name train: the connection$"):
        next(records)


def test_without_a_network_the_hub_is_not_reached() -> None:
    for name in ("org/no-such-name", "no-such-name"):
        with pytest.raises(InputError, match=f"{name} is not a file, and not a dataset") as raised:
            open_corpus(name)
        assert "HF_HUB_OFFLINE" in raised.value.hint and "\n" not in raised.value.message


@pytest.mark.parametrize("data", [["a text"], "-", "a.txt"])
def test_only_datasets_have_splits(data, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match="has no splits"):
        open_corpus(data, split="train")


# ------------------------------------------------------------------ libraries
@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("a.parquet", "pyarrow", "parquet"), ("a.conllu", "conllu", "conllu"), ("org/name", "datasets", "datasets")],
)
def test_libraries_that_are_missing_are_named_with_their_extra(name, module, extra, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if "/" not in name:
        (tmp_path / name).write_text("x")
        monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"needs {module}") as raised:
        open_corpus(name)
    assert raised.value.hint == f'pip install "headscope[{extra}]"'


def test_reading_imports_no_library_that_it_does_not_need(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('"a"')
    code = (
        "import sys, headscope.reading.order; from headscope.reading import open_corpus;"
        f"list(open_corpus({str(tmp_path)!r}).records());"
        "print(*{'torch', 'transformers', 'numpy', 'pyarrow', 'datasets', 'conllu'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# ------------------------------------------------------------------ memory
def test_texts_and_mappings_in_memory() -> None:
    given = ["one", {"text": "two", "label": np.int64(3)}, {"body": "x"}, 7, types.MappingProxyType({"text": "three"})]
    for data in (given, tuple(given), iter(given)):
        corpus, skipped = open_corpus(data), Skipped()
        expected = [Record(0, "one", None, "example 0"), Record(1, "two", 3, "example 1")]
        expected.append(Record(4, "three", None, "example 4"))
        assert list(corpus.records(skipped)) == list(corpus.records()) == expected
        assert type(expected[1].label) is int and [w for w, _ in skipped.first] == ["example 2", "example 3"]
    with pytest.raises(InputError, match="example 2 has no text: there is no 'text' in"):
        list(open_corpus(given, strict=True).records())
    assert texts(datasets.Dataset.from_dict({"text": ["a", "b"]})) == ["a", "b"]


def test_frames_are_no_sequences_of_texts() -> None:
    frame = pandas.DataFrame({"text": ["a", "b"], "label": [0, 1]})
    with pytest.raises(InputError, match="DataFrame is no sequence of texts"):
        open_corpus(frame)
    assert texts(frame["text"]) == ["a", "b"]


# ------------------------------------------------------------------ examples with labels
def test_examples_are_read_from_every_format(tmp_path, saved_datasets) -> None:
    rows = [("one", 1), ("two, or three", 0)]
    expected = Examples(("one", "two, or three"), (1, 0))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    lines = [json.dumps({"body": a, "class": b}) for a, b in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read_examples(tmp_path / "a.csv") == expected
    columns = {"text_column": "body", "label_column": "class"}
    assert read_examples(str(tmp_path / "a.jsonl"), **columns) == expected
    assert read_examples([json.loads(line) for line in lines], **columns) == expected
    assert read_examples(saved_datasets / "only") == Examples(("four",), (0,))
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "broken"]))
    with pytest.raises(InputError, match=r"a\.jsonl:3 is not JSON"):
        read_examples(tmp_path / "a.jsonl", **columns)
