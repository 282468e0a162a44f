"""What a draft table costs: looking up, building, and what its hot tier answers.

    python bench/table.py                      # all of it, about two minutes
    python bench/table.py --only lookup build

`lookup`: a table of 10 M entries made by the real builder from random Markov text, its file in the
page cache and not yet mapped; µs per request in batches of 16, drafts of 8 tokens.
`build`: tokens per second of ids that are already there, in memory and with a small memory.
`tiers`: share of the lookups that a tenth of the bytes answers, on held-out text (--text).
Writes JSON with -o; the last line is the number of the last part.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from common import count, provenance

from outrider.drafting.source import DraftContext
from outrider.drafting.table import TableSource
from outrider.sampling_params import SamplingParams
from outrider.tables.build import TableBuilder
from outrider.tables.format import Table
from outrider.tables.lookup import TableLookup
from outrider.tables.records import Settings

VOCAB = 49152
BATCH, WIDTH = 16, 8
PARTS = ("build", "lookup", "tiers")


def markov_text(num_tokens: int, seed: int) -> np.ndarray:
    """Text in which a token allows few others, some of them often: int32 [num_tokens]."""
    rng = np.random.default_rng(seed)
    choices = np.minimum(rng.zipf(1.3, num_tokens), 1 << 20).astype(np.int64)
    text = np.empty(num_tokens, np.int64)
    # The next token is a hash of the last one and of a Zipf choice, over 256 streams at once.
    streams = choices.reshape(256, -1)
    state = np.arange(256, dtype=np.int64)
    out = text.reshape(256, -1)
    for i in range(streams.shape[1]):
        state = ((state * 2654435761 + streams[:, i] * 40503) >> 7) % VOCAB
        out[:, i] = state
    return text.astype(np.int32)


def bench_build(directory: Path) -> dict[str, Any]:
    """Tokens per second from ids to a finished file."""
    text = markov_text(2_048_000, seed=1).reshape(-1, 2000)
    results = {}
    for name, memory in (("in memory", 1 << 30), ("64 MiB", 64 << 20)):
        started = perf_counter()
        with TableBuilder(VOCAB, "bench", Settings(), memory, directory) as builder:
            for part in text:
                builder.add(part)
            built = builder.finish(directory / "build.table", {})
        seconds = perf_counter() - started
        results[name] = {
            "tokens_per_second": round(text.size / seconds),
            "table_bytes": built.num_bytes,
        }
    return results


def bench_lookup(directory: Path, num_entries: int) -> dict[str, Any]:
    """µs per request of the compiled lookup, and of the whole source, on a file just opened."""
    path = directory / "lookup.table"
    text = _build_large(path, num_entries)
    rng = np.random.default_rng(5)
    starts = rng.integers(10, len(text) - 10, (3000, BATCH))
    table = Table(path)
    lookup = TableLookup(table.contents, table.confidence, WIDTH, branches=2)
    lookup.budgets[:] = WIDTH
    call, asked = [], []
    for batch in starts:
        lookup.contexts[:] = text[batch[:, None] - np.arange(1, 7)]
        started = perf_counter()
        lookup.draft(BATCH)
        call.append((perf_counter() - started) / BATCH * 1e6)
        asked.append(int(lookup.found.lengths.sum()))
    source = TableSource(Table(path), WIDTH, hot_bytes=0)
    params, whole = SamplingParams(), []
    for batch in starts:
        contexts = [DraftContext(str(i), text[:p], 1, params) for i, p in enumerate(batch)]
        started = perf_counter()
        source.propose(contexts, [WIDTH] * BATCH)
        whole.append((perf_counter() - started) / BATCH * 1e6)
    return {
        "entries": table.header["num_slots"],
        "table_bytes": table.num_bytes,
        "draft_tokens_per_request": round(float(np.mean(asked)) / BATCH, 2),
        "lookup_us": _percentiles(call),
        "propose_us": _percentiles(whole),
    }


def bench_tiers(directory: Path, texts: list[Path]) -> dict[str, Any]:
    """Lookups answered by a hot tier of a tenth of the bytes, on text that was held out."""
    from outrider.tables.corpus import Corpus, read_passages, tokenised
    from outrider.target.load import load_model

    tokenizer = load_model().tokenizer
    assert tokenizer is not None
    passages = [p for path in Corpus(texts).files() for p in read_passages(path, tokenizer)]
    encoded = list(tokenised(passages, tokenizer))
    held_out = encoded[9::10]
    with TableBuilder(tokenizer.vocab_size, tokenizer.fingerprint) as builder:
        for index, (ids, counted) in enumerate(encoded):
            if index % 10 != 9:
                builder.add(ids, counted)
        builder.finish(directory / "tiers.table", {})
    table = Table(directory / "tiers.table")
    lookups = [
        TableLookup(table.contents, table.confidence, WIDTH, 2, hot_bytes=budget)
        for budget in (0, table.num_bytes // 10)
    ]
    num_same = num_drafts = 0
    for ids, counted in held_out:
        for place in np.flatnonzero(counted).tolist():
            newest = ids[max(0, place - 6) : place][::-1]
            found = []
            for lookup in lookups:
                lookup.contexts[0] = -1
                lookup.contexts[0, : len(newest)] = newest
                lookup.budgets[0] = WIDTH
                answer = lookup.draft(1)
                found.append(answer.tokens[0, : answer.lengths[0]].tolist())
            num_drafts += 1
            num_same += found[0] == found[1]
    hot, cold, nowhere = lookups[1].answered.tolist()
    return {
        "table_bytes": table.num_bytes,
        "held_out_texts": len(held_out),
        "answered_by_hot_tier": round(hot / max(1, hot + cold), 4),
        "lookups": hot + cold + nowhere,
        "same_drafts": num_same / max(1, num_drafts),
    }


def _build_large(path: Path, num_entries: int) -> np.ndarray:
    """A table of about `num_entries` entries; its text, in which contexts are looked up."""
    num_tokens = num_entries * 256 // 256
    text = markov_text(num_tokens // 256 * 256, seed=2)
    with TableBuilder(VOCAB, "bench", Settings(min_value=0.0, min_share=0.0)) as builder:
        for part in np.array_split(text, len(text) // 2000):
            builder.add(part)
        builder.finish(path, {})
    return text


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 2) for p in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--entries", type=count, default=10_000_000)
    parser.add_argument("--text", nargs="+", type=Path, help="corpus of the part `tiers`")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    results: dict[str, Any] = {"provenance": provenance(2)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if "build" in given.only:
            results["build"] = bench_build(directory)
        if "lookup" in given.only:
            results["lookup"] = bench_lookup(directory, given.entries)
        if "tiers" in given.only and given.text:
            results["tiers"] = bench_tiers(directory, given.text)
    if given.output:
        given.output.write_text(json.dumps(results, indent=1) + "\n")
    for part in PARTS:
        if part in results:
            print(part, json.dumps(results[part]))


if __name__ == "__main__":
    main()
