"""Measures what forwards of a target cost on this machine, once, and keeps it in the cache.

A forward is timed at a few row counts, each over a short and a long context; between them the cost
model interpolates. The cache knows model, hardware, threads and version: a change of any of them
measures again.
"""

import hashlib
import json
import logging
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import outrider
from outrider.cache import cache_dir
from outrider.errors import ConfigError
from outrider.machine import cpu_name
from outrider.policy.cost import Surface
from outrider.target.base import PAGE_SIZE, ForwardBatch, Target
from outrider.target.kv import pages_for
from outrider.writing import whole_file

log = logging.getLogger("outrider")

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROWS_PER_REQUEST = 4  # about what a batch looks like: text row and some drafts each
CONTEXTS = (16, 1024)  # tokens of each request
ROUNDS, MOST_ROUNDS = 3, 6  # the fastest counts: others on the machine only ever make it slower
MOST_SECONDS = 2.0  # beyond them no more than the least number of rounds begins
AGREEMENT = 1.25  # ratio of two times of one forward, up to which nothing disturbed it


def surface_of(target: Target, num_pages: int, max_rows: int) -> Surface:
    """From the cache, or measured now. What is in the KV of the target is overwritten.

    Args:
        num_pages: that the target has allocated.
        max_rows: of one forward.
    """
    facts = _facts(target, max_rows)
    longest = _longest(target, num_pages)
    if longest < CONTEXTS[1]:  # which tells less of long texts
        facts["longest"] = longest
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path: Path | None = None
    try:
        path = cache_dir("costs") / f"{key}.json"
        return _read(path)
    except (ConfigError, OSError, ValueError, TypeError, KeyError):
        surface, is_sure = measure(target, num_pages, max_rows)
    if path is not None and is_sure:  # else the next start measures again
        _write(path, surface, facts)
    return surface


def measure(target: Target, num_pages: int, max_rows: int) -> tuple[Surface, bool]:
    """Time forwards of each row count and context; and whether nothing disturbed it."""
    longest = _longest(target, num_pages)
    each = min(ROWS_PER_REQUEST, target.max_model_len)
    contexts = (min(CONTEXTS[0], longest // 2), longest)
    rows = [count for count in ROWS if count <= max_rows]
    batches = [[_batch(target, n, each, context, num_pages) for context in contexts] for n in rows]
    rounds: list[np.ndarray] = []
    started = perf_counter()
    while len(rounds) < ROUNDS or (len(rounds) < MOST_ROUNDS and not _agree(rounds)):
        rounds.append(np.array([[_seconds(target, batch) for batch in pair] for pair in batches]))
        if perf_counter() - started > MOST_SECONDS and len(rounds) >= ROUNDS:
            break
    best = np.min(rounds, axis=0)
    # Noise only adds: what takes no longer with more rows takes no longer with fewer, and more rows
    # take no longer than as many forwards of fewer.
    best = np.minimum.accumulate(best[::-1], axis=0)[::-1]
    for i in range(1, len(rows)):
        best[i] = np.minimum(best[i], best[i - 1] * -(-rows[i] // rows[i - 1]))
    sums = np.array([[int(batch.context_lens.sum()) for batch in pair] for pair in batches])
    far = np.maximum(1, sums[:, 1] - sums[:, 0])
    # KV is read at one speed whatever the rows; the median knows it best.
    slope = max(0.0, float(np.median((best[:, 1] - best[:, 0]) / far))) if longest else 0.0
    base = np.maximum(best[:, 0] - slope * sums[:, 0], best[:, 0] / 2)
    surface = Surface(tuple(rows), tuple(base.tolist()), (slope,) * len(rows))
    return surface, _agree(rounds)


def _longest(target: Target, num_pages: int) -> int:
    """The longer of the contexts over which forwards are timed."""
    return max(
        0, min(CONTEXTS[1], target.max_model_len - ROWS_PER_REQUEST, num_pages * PAGE_SIZE // 2)
    )


def _agree(rounds: list[np.ndarray]) -> bool:
    """Whether the two fastest times of every forward are close: nothing held both up."""
    if len(rounds) < 2:
        return False
    first, second = np.sort(rounds, axis=0)[:2]
    return bool((second < AGREEMENT * first).all())


def _seconds(target: Target, batch: ForwardBatch) -> float:
    """Of a forward behind another one of its size, as they come in decoding.

    Behind one of 128 rows a forward of one row takes 1.4 times as long on two CPUs.
    """
    target.forward(batch).logits[0, 0].item()
    start = perf_counter()
    target.forward(batch).logits[0, 0].item()  # waits for a device
    return perf_counter() - start


def _batch(target: Target, num_rows: int, each: int, context: int, num_pages: int) -> ForwardBatch:
    """Rows of as many requests as they make, each in pages of its own as far as there are some."""
    counts = [each] * (num_rows // each)
    if num_rows % each:
        counts.append(num_rows % each)
    held = pages_for(context + each)
    local = np.concatenate([np.arange(count) for count in counts])  # place among its request's rows
    return ForwardBatch(
        token_ids=(np.arange(num_rows) % target.vocab_size).astype(np.int32),
        positions=(context + local).astype(np.int32),
        row_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_lens=np.full(len(counts), context, np.int32),
        page_tables=[
            ((np.arange(held) + i * held) % num_pages).astype(np.int32) for i in range(len(counts))
        ],
        parents=(local - 1).astype(np.int32),
        logits_rows=np.arange(num_rows, dtype=np.int32),
        is_tree=np.zeros(len(counts), np.bool_),
    )


def _facts(target: Target, max_rows: int) -> dict[str, Any]:
    """What the cost depends on."""
    return {
        "outrider": outrider.__version__,
        "torch": torch.__version__,
        "target": [target.name, type(target).__name__, str(target.dtype), str(target.device)],
        "sizes": [target.hidden_size, target.num_layers, target.vocab_size, max_rows],
        "deterministic": target.deterministic,
        "machine": [platform.machine(), cpu_name(), os.cpu_count()],
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "",
        "threads": torch.get_num_threads(),
        "rounds": [ROUNDS, MOST_ROUNDS, AGREEMENT, "behind one of its size"],
    }


def _read(path: Path) -> Surface:
    found = json.loads(path.read_text())
    parts = [tuple(map(float, found[name])) for name in ("base", "per_token")]
    rows = tuple(map(int, found["rows"]))
    if not len(rows) == len(parts[0]) == len(parts[1]) > 0 or min(parts[0]) <= 0:
        raise ValueError(f"{path} is no table of costs")
    return Surface(rows, *parts)


def _write(path: Path, surface: Surface, facts: dict[str, Any]) -> None:
    """Keep it for the next start; a cache that cannot be written costs a second each time."""
    made = datetime.now(UTC).isoformat(timespec="seconds")
    content = {
        "rows": surface.rows,
        "base": surface.base,
        "per_token": surface.per_token,
        "made": made,
        "of": facts,
    }
    try:
        with whole_file(path) as file:
            file.write(json.dumps(content, indent=1).encode())
    except OSError as error:
        log.warning("costs of this machine cannot be kept in %s: %s", path, error.strerror)
