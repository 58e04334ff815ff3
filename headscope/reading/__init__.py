"""Corpora of texts, read as a stream."""

from headscope.reading.corpus import Corpus, Data, open_corpus
from headscope.reading.records import Record, Skipped

__all__ = ["Corpus", "Data", "Record", "Skipped", "open_corpus"]
