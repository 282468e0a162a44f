"""Small tables of random text, and the tokenizer they are for."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from toy_models import toy_tokenizer

from outrider.tables.build import MIN_MEMORY, TableBuilder
from outrider.tables.format import Table
from outrider.tables.records import Settings
from outrider.tokenizer import Tokenizer

PROVENANCE = {"command": "a test", "seed": 1}


def texts(
    count: int = 40, length: int = 120, vocab_size: int = 30, seed: int = 1
) -> list[np.ndarray]:
    """Random texts in which few tokens are frequent: int32 [length] each."""
    rng = np.random.default_rng(seed)
    return [(rng.zipf(1.6, length) % vocab_size).astype(np.int32) for _ in range(count)]


def write_table(
    path: Path,
    corpus: Iterable[np.ndarray | Sequence[int]],
    vocab_size: int = 30,
    settings: Settings | None = None,
    max_bytes: int | None = None,
    fingerprint: str = "toy",
) -> Table:
    with TableBuilder(vocab_size, fingerprint, settings, MIN_MEMORY) as builder:
        for text in corpus:
            builder.add(np.asarray(text, np.int32))
        builder.finish(path, PROVENANCE, max_bytes)
    return Table(path)


def toy_table(corpus: Iterable[np.ndarray | Sequence[int]], vocab_size: int = 30) -> Table:
    """A table whose file is gone already; what is mapped stays."""
    with tempfile.TemporaryDirectory() as directory:
        return write_table(Path(directory) / "toy.table", corpus, vocab_size)


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    return Tokenizer.from_transformers(toy_tokenizer(chat_template))
