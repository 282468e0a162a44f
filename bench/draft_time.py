"""What a draft costs beside one plain forward of the target.

    python bench/draft_time.py                 # all algorithms, about half a minute
    python bench/draft_time.py --only dflash -o draft_time.json

Drafters have the shapes of their recipes and random weights: time does not depend on what they
say. A draft takes in the features of three new tokens, the mean of a step, and guesses K tokens:
input, layers, head, choice. Sides take turns, and a plain forward of the target goes before every
draft, as in use; it leaves nothing of the drafter in the caches. Milliseconds, median and first
quartile; the last line is the share of the slowest draft with K = 7 of one request.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import alternate, count, provenance, seconds

from outrider.bench.timing import spread
from outrider.drafters import Drafter, DrafterConfig, make_drafter
from outrider.drafters.native import NativeStack, why_not_native
from outrider.drafters.native_draft import (
    Asked,
    NativeBlocks,
    NativeChains,
    NativeMasks,
    native_blocks,
    native_chains,
    native_masks,
)
from outrider.drafters.native_heads import MarkovChains, MedusaHeads, input_projection
from outrider.drafters.stack import Stack, TorchStack
from outrider.target.base import ForwardBatch, Target
from outrider.target.load import load_target

CONTEXT, NEW, MOST = 512, 3, 7
PAGES = 40  # of one request
SHAPES: dict[str, dict[str, Any]] = {
    "eagle3": {"num_layers": 1, "target_layer_ids": (1, 14, 27)},
    "peagle": {"num_layers": 2, "target_layer_ids": (1, 14, 27)},
    "dflash": {"num_layers": 2, "qk_norm": True},
    "dspark": {"num_layers": 2, "qk_norm": True, "markov_rank": 48},
    "mtp": {"num_layers": 1, "target_layer_ids": (29,)},
    "pard": {"num_layers": 4},
    "medusa": {"num_layers": 1, "target_layer_ids": (29,)},
}


def random_drafter(algorithm: str, target: Any) -> Drafter:
    """A drafter of a recipe's shape for this target."""
    hidden, layers = target.hidden_size, target.num_layers
    settings: dict[str, Any] = {
        "target_layer_ids": tuple(int(layers * share) for share in (0.1, 0.3, 0.5, 0.7, 0.9)),
        **SHAPES[algorithm],
    }
    config = DrafterConfig(
        algorithm=algorithm,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 192,
        head_dim=64,
        vocab_size=target.vocab_size,
        draft_vocab_size=8192,
        num_draft_tokens=MOST,
        target_hidden_size=hidden,
        target_num_layers=layers,
        mask_token_id=3,
        **settings,
    )
    torch.manual_seed(0)
    drafter = make_drafter(config).eval()
    drafter.d2t = torch.arange(config.draft_vocab_size)
    drafter.attach(target.embedding.float(), target.head.float())
    return drafter


def batch_of(sizes: list[int], contexts: list[int], two_way: bool = False) -> ForwardBatch:
    """Rows of several requests, each in pages of its own; logits of the last `MOST` of each."""
    starts = np.cumsum([0, *sizes], dtype=np.int32)
    places = [np.arange(c, c + n, dtype=np.int32) for c, n in zip(contexts, sizes, strict=True)]
    return ForwardBatch(
        token_ids=np.full(starts[-1], 100, np.int32),
        positions=np.concatenate(places),
        row_starts=starts,
        context_lens=np.array(contexts, np.int32),
        page_tables=[np.arange(PAGES, dtype=np.int32) + b * PAGES for b in range(len(sizes))],
        parents=np.concatenate([np.arange(-1, n - 1, dtype=np.int32) for n in sizes]),
        logits_rows=np.arange(starts[-1], dtype=np.int32),
        is_tree=np.zeros(len(sizes), np.bool_),
        two_way=two_way,
    )


class Drafting:
    """One draft of each request: the calls that a draft source makes, nothing around them."""

    def __init__(self, algorithm: str, target: Any, num_requests: int, compiled: bool) -> None:
        self.drafter: Any = random_drafter(algorithm, target)
        config = self.drafter.config
        self.stack: Stack = (
            NativeStack(self.drafter, target.dtype)
            if compiled
            else TorchStack(self.drafter.to(target.dtype))
        )
        self.stack.allocate_kv(PAGES * num_requests)
        self.project = input_projection(self.drafter, target.dtype)
        self.heads = MedusaHeads(self.drafter, target.dtype) if algorithm == "medusa" else None
        self.chains = None
        if algorithm == "dspark" and self.drafter.markov_head is not None:
            self.chains = MarkovChains(self.drafter.markov_head, self.drafter.d2t, target.dtype)
        self.drafter.projection = self.project
        self.blocks: NativeBlocks | None = None
        self.masks: NativeMasks | None = None
        self.one_by_one: NativeChains | None = None
        if algorithm in ("dflash", "dspark"):
            self.blocks = native_blocks(self.drafter, self.stack, self.chains)
        elif algorithm in ("peagle", "pard"):
            self.masks = native_masks(self.drafter, self.stack)
        elif algorithm in ("eagle3", "mtp"):
            self.one_by_one = native_chains(self.drafter, self.stack)
        self.count = num_requests
        self.algorithm = algorithm
        self.features = torch.randn(NEW * num_requests, config.feature_size)
        self.new = batch_of([NEW] * num_requests, [CONTEXT - NEW] * num_requests)
        self.new.logits_rows = np.arange(NEW - 1, NEW * num_requests, NEW, dtype=np.int32)

    @torch.inference_mode()
    def draft(self, num_tokens: int) -> None:
        if self.heads is not None:
            newest = self.features[self.new.logits_rows]
            self.heads.logits(newest, [num_tokens] * self.count).argmax(1)
        elif self.algorithm in ("dflash", "dspark"):
            self._block(num_tokens)
        elif self.algorithm in ("peagle", "pard"):
            self._masks(num_tokens)
        else:
            self._one_by_one(num_tokens)

    def _embedded(self, count: int) -> torch.Tensor:
        return self.drafter.embed(torch.full((count,), 100)).float()

    def _block(self, num_tokens: int) -> None:
        assert self.project is not None
        size = self.drafter.first_slot + num_tokens
        if self.blocks is not None:
            self.blocks.draft(self._asked(num_tokens))
            return
        self.stack.store_context(self.new, self.project(self.features))
        batch = batch_of([size] * self.count, [CONTEXT] * self.count, two_way=True)
        rows = np.arange(self.count)[:, None] * size + self.drafter.first_slot
        batch.logits_rows = (rows + np.arange(num_tokens)).astype(np.int32).ravel()
        _, logits = self.stack.run(batch, self._embedded(size * self.count))
        if self.chains is None:
            logits.argmax(1)
        else:
            anchors = np.full(self.count, 100, np.int32)
            self.chains.greedy(logits, [num_tokens] * self.count, anchors)

    def _asked(self, num_tokens: int) -> Asked:
        length = CONTEXT + (0 if self.algorithm == "pard" else 1)
        return Asked(
            held=[CONTEXT - NEW] * self.count,
            texts=[np.full(length, 100, np.int32)] * self.count,
            budgets=[num_tokens] * self.count,
            page_tables=list(self.new.page_tables),
            features=self.features,
        )

    def _masks(self, num_tokens: int) -> None:
        if self.masks is not None:
            self.masks.draft(self._asked(num_tokens))
            return
        size = NEW + num_tokens - 1
        batch = batch_of([size] * self.count, [CONTEXT - NEW] * self.count)
        rows = np.arange(self.count)[:, None] * size + NEW - 1
        batch.logits_rows = (rows + np.arange(num_tokens)).astype(np.int32).ravel()
        x = embedded = self._embedded(size * self.count)
        if self.project is not None:
            x = self.project(self.features)
            x = torch.cat([x, x[:1].expand(len(embedded) - len(x), -1)])
        self.stack.run(batch, x, None if self.project is None else embedded)[1].argmax(1)

    def _one_by_one(self, num_tokens: int) -> None:
        if self.one_by_one is not None:
            self.one_by_one.draft(self._asked(num_tokens))
            return
        assert self.project is not None
        is_mtp = self.algorithm == "mtp"
        embedded = self._embedded(NEW * self.count)
        x = self.project(embedded, self.features) if is_mtp else self.project(self.features)
        states, logits = self.stack.run(self.new, x, None if is_mtp else embedded)
        logits.argmax(1)
        for step in range(1, num_tokens):
            batch = batch_of([1] * self.count, [CONTEXT + step - 1] * self.count)
            embedded = self._embedded(self.count)
            x = self.project(embedded, states) if is_mtp else states
            states, logits = self.stack.run(batch, x, None if is_mtp else embedded)
            logits.argmax(1)


def measure(
    target: Target, algorithms: list[str], num_requests: int, rounds: int, compiled: bool
) -> dict[str, dict[str, float]]:
    """Seconds of each side: median and first quartile."""
    plain = batch_of([1] * num_requests, [CONTEXT] * num_requests)
    target.allocate_kv(PAGES * num_requests)
    sides: dict[str, Callable[[], Any]] = {"plain forward": lambda: target.forward(plain)}
    for algorithm in algorithms:
        drafting = Drafting(algorithm, target, num_requests, compiled)
        for num_tokens in (1, MOST):
            name = f"{algorithm} K={num_tokens}"
            sides[name] = lambda d=drafting, n=num_tokens: d.draft(n)

    def after_a_plain_forward(side: Callable[[], Any]) -> float:
        target.forward(plain)
        return seconds(side)

    calls = [lambda side=side: after_a_plain_forward(side) for side in sides.values()]
    alternate(2, *calls)  # warm-up
    results = map(spread, alternate(rounds, *calls))
    return {
        name: {"median": found.median, "low": found.low}
        for name, found in zip(sides, results, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--requests", nargs="+", type=count, default=[1, 8])
    parser.add_argument("--rounds", type=count, default=40)
    parser.add_argument("--torch", action="store_true", help="layers in torch, not compiled")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    target, _ = load_target()
    assert arguments.torch or why_not_native(random_drafter("pard", target)) is None
    record: dict[str, Any] = {"provenance": provenance(torch.get_num_threads())}
    share = 0.0
    for num_requests in arguments.requests:
        found = measure(target, arguments.only, num_requests, arguments.rounds, not arguments.torch)
        record[f"{num_requests} requests"] = found
        print(f"\nrequests {num_requests}            median      q1   of a plain forward")
        base = found["plain forward"]
        for name, times in found.items():
            print(
                f"  {name:16s}  {times['median'] * 1e3:7.2f} {times['low'] * 1e3:7.2f}  "
                f"{times['median'] / base['median']:6.1%} {times['low'] / base['low']:6.1%}"
            )
            if num_requests == 1 and name.endswith(f"K={MOST}"):
                share = max(share, times["median"] / base["median"])
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{share:.3f}")


if __name__ == "__main__":
    main()
