"""Every format gives back the texts that were written, and names what is no text."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headscope.errors import InputError
from headscope.reading import Skipped, lines, open_corpus, readers

# Whatever UTF-8 can hold; more often what other programs take for the end of a line, of a field or of a file.
CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("\u2028\u2029\x85\x0b\x0c\x1c\x1e\x00\ufeff\",;\t'\\ü漢😀"),
)
WITH_NEWLINES = st.text(st.one_of(CHARACTERS, st.sampled_from("\r\n")), min_size=1).filter(str.strip)
ONE_LINE = st.text(CHARACTERS.filter(lambda c: c not in "\r\n"), min_size=1).filter(str.strip)
LABELS = st.one_of(st.none(), st.integers(-(10**12), 10**12), st.text(st.characters(categories=["L"]), min_size=1))
ENDS = st.sampled_from(["\n", "\r\n"])


def read(path, **options):
    """(texts and labels, tally) of a corpus."""
    skipped = Skipped()
    records = list(open_corpus(path, **options).records(skipped))
    return [(r.text, r.label) for r in records], skipped


def texts(path, **options):
    return [text for text, _ in read(path, **options)[0]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("reading")


def csv_bytes(rows, end="\n", **dialect):
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator=end, **dialect).writerows(rows)
    return file.getvalue().encode()


# ------------------------------------------------------------------ round trips
@settings(max_examples=50, deadline=None)
@given(st.lists(ONE_LINE, min_size=1), ENDS, st.sampled_from(["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"]))
def test_lines_come_back(place, given_texts, end, encoding) -> None:
    path = place / "a.txt"
    mark = "\ufeff" if encoding.startswith("utf-16") else ""
    if encoding == "utf-8" and given_texts[0].startswith("\ufeff"):
        given_texts = ["x" + given_texts[0], *given_texts[1:]]
    path.write_bytes((mark + end.join(["", *given_texts, ""])).encode(encoding))
    assert texts(path) == given_texts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(WITH_NEWLINES, LABELS), min_size=1), ENDS, st.booleans(), st.booleans())
def test_json_lines_come_back(place, rows, end, escaped, compressed) -> None:
    body = end.join(json.dumps({"label": b, "id": 7, "text": a}, ensure_ascii=escaped) for a, b in rows).encode()
    path = place / ("a.jsonl.gz" if compressed else "a.ndjson")
    path.write_bytes(gzip.compress(body, 1) if compressed else body)
    assert read(path)[0] == rows


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(WITH_NEWLINES, LABELS), min_size=1), ENDS, st.booleans(), st.booleans())
def test_tables_come_back(place, rows, end, tabs, quoted) -> None:
    # Python's writer leaves a carriage return without quotes where it does not end lines with one.
    quoted |= end == "\n" and any("\r" in text for text, _ in rows)
    table = [("id", "label", "text"), *((3, b, a) for a, b in rows)]
    dialect = {"delimiter": "\t" if tabs else ",", "quoting": csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL}
    path = place / ("a.tsv" if tabs else "a.csv")
    path.write_bytes(csv_bytes(table, end, **dialect))
    assert read(path)[0] == rows


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(WITH_NEWLINES, st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(1, 7),
    st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]),
)
def test_parquet_comes_back(place, rows, group, kind) -> None:
    path = place / "a.parquet"
    columns = {"id": pa.array(range(len(rows))), "text": pa.array([a for a, _ in rows]).cast(kind)}
    pq.write_table(pa.table(columns | {"label": [b for _, b in rows]}), path, row_group_size=group)
    assert read(path)[0] == rows
    records = list(open_corpus(path).records())
    assert [r.where for r in records] == [f"{path}:row {i}" for i in range(len(rows))]


def test_columns_are_chosen(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one", "class": "x"}\n"two"\n')
    (tmp_path / "a.csv").write_text("text,class,body\nno,7,one\nno,,two\n")
    pq.write_table(pa.table({"text": [1, 2], "body": ["one", "two"], "class": ["x", None]}), tmp_path / "a.parquet")
    for name, label in (("a.jsonl", "x"), ("a.csv", 7), ("a.parquet", "x")):
        found, _ = read(tmp_path / name, text_column="body", label_column="class")
        assert found == [("one", label), ("two", None)]


# ------------------------------------------------------------------ treebanks
TREEBANK = """\
# global.columns = ID FORM LEMMA UPOS XPOS FEATS HEAD DEPREL DEPS MISC

# sent_id = 1
# text = He said: hello\u2028there!
1\tHe\the\tPRON\t_\t_\t2\tnsubj\t_\t_

# sent_id = 2
1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_
1\tde\tde\tADP\t_\t_\t3\tcase\t_\t_
2\tle\tle\tDET\t_\t_\t3\tdet\t_\t_
3\tchat\tchat\tNOUN\t_\t_\t0\troot\t_\tSpaceAfter=No
3.1\tgone\tgone\tVERB\t_\t_\t_\t_\t_\t_
4\t,\t,\tPUNCT\t_\t_\t3\tpunct\t_\tA=b|SpaceAfter=No
5\t_\t_\tPUNCT\t_\t_\t3\tpunct\t_\t_


1\tbroken
x\ttwo

# only a comment

1\tend\tend\tX\t_\t_\t0\troot\t_\t_
"""


def test_sentences_of_a_treebank(tmp_path) -> None:
    (tmp_path / "a.conllu").write_bytes(TREEBANK.replace("\n", "\r\n").encode())
    found, skipped = read(tmp_path / "a.conllu")
    assert found == [("He said: hello\u2028there!", None), ("du chat,_", None), ("end", None)]
    (where, reason) = skipped.first[0]
    assert skipped.count == 1 and where.endswith("a.conllu:17") and "CoNLL-U" in reason


def test_columns_that_a_treebank_declares(tmp_path) -> None:
    (tmp_path / "a.conll").write_text("# global.columns = FORM MISC\nno\tSpaceAfter=No\nise\t_\n\nwell\t_\n")
    assert texts(tmp_path / "a.conll") == ["noise", "well"]


# ------------------------------------------------------------------ bad items
BAD = [
    ("a.jsonl", b'{"text": "good"}\n{"text"\n', 2, "is not JSON"),
    ("a.jsonl", b'"good"\n' + b"[" * 100_000, 2, "is not JSON"),
    ("a.jsonl", b'"good"\n{"text": "a", "label": ' + b"1" * 5000 + b"}", 2, "is not JSON"),
    ("a.jsonl", b'"good"\n\n["a"]\n', 3, "neither a text nor an object"),
    ("a.jsonl", b'"good"\n7\n', 2, "neither a text nor an object"),
    ("a.jsonl", b'"good"\nnull\n', 2, "neither a text nor an object"),
    ("a.jsonl", b'"good"\n{"title": "x"}\n', 2, "no 'text' in ['title']"),
    ("a.jsonl", b'"good"\n{"text": null}\n', 2, "has no text"),
    ("a.jsonl", b'"good"\n{"text": " \\u2028"}\n', 2, "has no text"),
    ("a.jsonl", b'"good"\n{"text": 5}\n', 2, "has 5 for a text"),
    ("a.jsonl", b'"good"\n{"text": "a", "label": 0.5}\n', 2, "the label 0.5"),
    ("a.jsonl", b'"good"\n{"text": "a", "label": true}\n', 2, "the label True"),
    ("a.jsonl", b'"good"\n{"text": "a", "label": [1]}\n', 2, "the label [1]"),
    ("a.jsonl", b'"good"\n{"text": "a \\ud800"}\n', 2, "half a character"),
    ("a.jsonl", b'"good"\n{"text": "a", "label": "\\udfff"}\n', 2, "half a character"),
    ("a.jsonl", b'"good"\n"caf\xe9"\n', 2, "is not UTF-8 (byte 4)"),
    ("a.txt", b"good\n\ncaf\xe9\n", 3, "is not UTF-8 (byte 3)"),
    ("a.txt", "good\nhalf \ud800 \n".encode("utf-16", "surrogatepass"), 2, "is not UTF-8"),
    ("a.txt", "good\nlast".encode("utf-16") + b"x", 2, "is not UTF-8"),
    ("a.csv", b"text,label\ngood,\n\na,b,c\n", 4, "has 3 fields instead of 2"),
    ("a.csv", b'text,id\ngood,"\n\n"\nonly\n', 5, "has 1 field instead of 2"),
    ("a.csv", b'text,id\ngood,\n"",7\n', 3, "has no text"),
    ("a.csv", b"text,id\ngood,\ncaf\xe9,7\n", 3, "is not UTF-8"),
    ("a.csv", b'text,id\ngood,\n"a"b,7\n', 3, "is not CSV"),
    ("a.csv", b"text,id\ngood,\na\rb,7\n", 3, "is not CSV"),
    ("a.csv", b'text,id\ngood,\n"never closed,7\nx,8\n', 3, "is not CSV (unexpected end of data)"),
]


@pytest.mark.parametrize(("name", "content", "line", "reason"), BAD, ids=[f"{b[0]}-{b[3]}" for b in BAD])
def test_bad_items_are_counted_and_named(name, content, line, reason, tmp_path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    found, skipped = read(path)
    assert found == [("good", None)]
    assert skipped.count == 1 and skipped.items == 2
    (where, said) = skipped.first[0]
    assert where == f"{path}:{line}" and reason in said
    assert skipped.lines() == (f"1 of 2 texts was skipped: {where} {said}",)
    records = open_corpus(path, strict=True).records()
    assert next(records).text == "good"
    with pytest.raises(InputError) as raised:
        next(records)
    assert raised.value.message == f"{where} {said}" and raised.value.hint


def test_bad_cells_of_parquet(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")])
    column = pa.chunked_array([pa.array(["good", None, " "]), bad, pa.array(["fine"])])
    pq.write_table(pa.table({"text": column, "label": [1, 1, 1, 1, 2]}), path)
    found, skipped = read(path)
    assert found == [("good", 1), ("fine", 2)]
    expected = [(1, "has no text"), (2, "has no text"), (3, "is not UTF-8 (byte 1)")]
    assert skipped.first == [(f"{path}:row {row}", reason) for row, reason in expected]
    pq.write_table(pa.table({"text": ["good", "b"], "label": [1.0, 0.5]}), path)
    with pytest.raises(InputError, match=r"row 0 has the label 1\.0"):
        read(path, strict=True)


def test_ten_bad_items_are_named_and_all_have_numbers(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join('{"text": "x"}\n' if i % 100 == 7 else "broken\n" for i in range(1200)))
    skipped = Skipped()
    records = list(open_corpus(path).records(skipped))
    assert [r.number for r in records] == list(range(7, 1200, 100))
    assert [r.where for r in records] == [f"{path}:{i + 1}" for i in range(7, 1200, 100)]
    (line,) = skipped.lines()
    assert line.startswith("1,188 of 1,200 texts were skipped: ") and line.endswith("; …")
    assert [f"{path}:{i} " in line for i in (1, 7, 8, 9, 11, 12)] == [True, True, False, True, True, False]
    assert "\n" not in line and len(skipped.first) == 10 and Skipped().lines() == ()


def test_mixed_encodings_lose_only_their_lines(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve\n".encode() + "naïve\n".encode("latin-1") + "naïve 2\0\n".encode())
    with pytest.raises(InputError, match="holds binary data"):
        open_corpus(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes("naïve\n".encode() + "naïve\n".encode("latin-1") + "naïve 2\n".encode())
    assert texts(tmp_path / "a.txt") == ["naïve", "naïve 2"]
    (tmp_path / "a.txt").write_bytes("a zero \0 is text é".encode())
    assert texts(tmp_path / "a.txt") == ["a zero \0 is text é"]


# ------------------------------------------------------------------ files that are no texts
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", bytes(range(256)) * 8, "is not text"),
        ("a.jsonl", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not text"),
        ("a.csv", b"\x7fELF\x02\x01\0\0\xff\xff", "is not text"),
        ("a.txt", "text".encode("utf-32"), "is UTF-32"),
        ("a.parquet", b"text\nno parquet\n", "is not Parquet"),
        ("a.parquet", b"", "is not Parquet"),
        ("a.txt.gz", b"plain", "is not gzip"),
        ("a.txt.gz", gzip.compress(b"a text\n" * 1000, mtime=0)[:-12], "is not gzip, or is damaged"),
        ("a.csv", b"title,body\na,b\n", "no column 'text': its columns are title, body"),
        ("a.csv", b"text,text\na,b\n", "2 columns 'text'"),
        ("a.csv", b"te\xffxt\na\n", "header .*a.csv:1 is not UTF-8"),
    ],
)
def test_files_of_another_kind_are_refused_when_opened(name, content, message, tmp_path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        list(open_corpus(tmp_path / name).records())
    assert "\n" not in raised.value.message and raised.value.hint


def test_columns_of_parquet_are_checked_when_opened(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"title": ["a"], "text": [1]}), path)
    for options, message in (
        ({}, "has int64 in column text, not texts"),
        ({"text_column": "body"}, "no column 'body': its columns are title, text"),
        ({"text_column": "title", "label_column": "class"}, "no column 'class'"),
    ):
        with pytest.raises(InputError, match=message):
            open_corpus(path, **options)


def test_damage_in_the_middle_is_told(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {i} {i * 7919}" for i in range(50_000)]}), path, row_group_size=10_000)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4000] = b"\xff" * 4000
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"damaged|cannot read"):
        list(open_corpus(path).records())
    zipped = gzip.compress(b"".join(b"text %d\n" % (i * 7919) for i in range(50_000)))
    (tmp_path / "a.txt.gz").write_bytes(zipped[: len(zipped) // 2])
    records = open_corpus(tmp_path / "a.txt.gz").records()
    assert next(records).text == "text 0"
    with pytest.raises(InputError, match="damaged"):
        list(records)


# ------------------------------------------------------------------ size
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_a_text_of_ten_megabytes_is_a_text(name, tmp_path) -> None:
    path, long = tmp_path / name, "wörd " * (10 << 18)
    limit = csv.field_size_limit()
    if name == "a.parquet":
        pq.write_table(pa.table({"text": ["a", long, "b"]}), path)
    elif name == "a.csv":
        path.write_bytes(csv_bytes([["text"], ["a"], [long], ["b"]]))
    else:
        body = "\n".join(f'"{t}"' if "jsonl" in name else t for t in ("a", long, "b")).encode()
        path.write_bytes(gzip.compress(body, 1) if name.endswith("gz") else body)
    assert texts(path) == ["a", long, "b"]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.conllu"])
def test_longer_lines_are_counted(name, tmp_path, monkeypatch) -> None:
    """With a limit of 1,000 bytes in place of 64 MB, so that the test is quick."""
    for module in (lines, readers):
        monkeypatch.setattr(module, "LONGEST", 1000)
    long = "x" * 200_000
    row = {"a.jsonl": '"{}"\n', "a.conllu": "1\t{}\t_\n\n"}.get(name, "{}\n")
    (tmp_path / name).write_text("text\n" * (name == "a.csv") + "".join(row.format(t) for t in ("a", long, "b")))
    found, skipped = read(tmp_path / name)
    assert [t for t, _ in found] == ["a", "b"]
    assert skipped.count == 1 and "longer than 64 MB" in skipped.first[0][1]


def test_a_sentence_without_end_is_not_held(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "LONGEST", 1000)
    (tmp_path / "a.conllu").write_text("1\ta\t_\n\n" + "1\tb\t_\n" * 1000 + "\n1\tc\t_\n")
    found, skipped = read(tmp_path / "a.conllu")
    assert [t for t, _ in found] == ["a", "c"] and "longer than 64 MB" in skipped.first[0][1]


def peak_of_reading(path) -> tuple[int, int]:
    """How many texts there are, and the most bytes that Python held while they were read."""
    corpus = open_corpus(path)
    tracemalloc.start()
    try:
        count = sum(1 for _ in corpus.records())
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz"])
def test_memory_does_not_grow_with_the_corpus(name, tmp_path) -> None:
    count = 200_000 if name == "a.txt" else 50_000
    row = '{"text": "text number %d of many"}\n' if name == "a.jsonl" else "text number %d of many\n"
    body = "text\n" * (name == "a.csv") + "".join(row % i for i in range(count))
    (tmp_path / name).write_bytes(gzip.compress(body.encode(), 1) if name.endswith("gz") else body.encode())
    assert len(body) > 1_000_000
    found, peak = peak_of_reading(tmp_path / name)
    assert found == count and peak < 600_000


def test_memory_of_parquet_is_that_of_a_batch(tmp_path) -> None:
    """One row group of 64 MB in pages of 1 MB: what Python and Arrow hold together stays a fraction of it."""
    path = tmp_path / "a.parquet"
    written = pa.table({"text": [f"{i} " + chr(97 + i % 26) * 32_768 for i in range(2_000)]})
    options = {"row_group_size": 2_000, "write_batch_size": 32, "compression": "none", "use_dictionary": False}
    pq.write_table(written, path, **options)
    del written
    corpus, pool, most, shares = open_corpus(path), pa.default_memory_pool(), 0, []
    before = pool.bytes_allocated()
    tracemalloc.start()
    try:
        for record in corpus.records():
            most = max(most, pool.bytes_allocated() - before)
            shares.append(corpus.share())
            assert len(record.text) > 32_000
        most += tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(shares) == 2_000
    assert path.stat().st_size > 60 << 20 and most < 12 << 20
    assert 0.4 < shares[1_000] < 0.6 and shares == sorted(shares)
