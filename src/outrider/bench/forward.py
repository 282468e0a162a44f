"""What one forward of the target costs by its rows: the price of verifying drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.bench.timing import Spread, alternate, seconds, spread
from outrider.engine.tenancy import tenancy_of
from outrider.target.base import PAGE_SIZE, ForwardBatch

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.target.base import Target

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT_TOKENS = 512
REPEATS = 15
BUDGET_SECONDS = 10.0  # a large model is measured fewer times
FEWEST_REPEATS = 3


@dataclass(slots=True)
class ForwardCost:
    """Seconds of a forward of one request by its new rows."""

    context_tokens: int
    rows: list[int]
    seconds: list[Spread]

    @property
    def ratios(self) -> list[float]:
        """To the cheapest of the forwards with one and two rows."""
        cheapest = min(one.median for one in self.seconds[:2])
        return [one.median / cheapest for one in self.seconds]


def forward_cost(llm: "LLM", rows: Sequence[int] = ROWS) -> ForwardCost:
    """Measure on the target of an engine; row counts take turns.

    The context is shorter where the KV cache is. Engines on this target find their KV gone.
    """
    target = llm.engine.target
    room = min(llm.engine.arena.num_pages * PAGE_SIZE, llm.engine.max_model_len)
    rows = [count for count in rows if count <= room // 2]
    context = min(CONTEXT_TOKENS, room - max(rows))
    tenancy_of(target).take(target, object(), llm.engine.arena.num_pages)
    target.forward(chain(target, context, 0, num_logits=1))

    def once(count: int) -> float:
        return seconds(lambda: target.forward(chain(target, count, context)))

    first = sum(once(count) for count in rows)  # also the warm-up
    repeats = int(max(FEWEST_REPEATS, min(REPEATS, BUDGET_SECONDS / first)))
    results = alternate(repeats, *(lambda count=count: once(count) for count in rows))
    return ForwardCost(context, list(rows), [spread(result) for result in results])


def chain(
    target: "Target", num_rows: int, context_tokens: int, num_logits: int | None = None
) -> ForwardBatch:
    """New rows of one request behind its context, which is in the first pages.

    Args:
        num_logits: of how many rows, the last ones, logits are wanted; None: of all.
    """
    num_pages = -(-(context_tokens + num_rows) // PAGE_SIZE)
    first = 0 if num_logits is None else num_rows - num_logits
    return ForwardBatch(
        token_ids=np.arange(100, 100 + num_rows, dtype=np.int32) % target.vocab_size,
        positions=np.arange(context_tokens, context_tokens + num_rows, dtype=np.int32),
        row_starts=np.array([0, num_rows], np.int32),
        context_lens=np.array([context_tokens], np.int32),
        page_tables=[np.arange(num_pages, dtype=np.int32)],
        parents=np.arange(-1, num_rows - 1, dtype=np.int32),
        logits_rows=np.arange(first, num_rows, dtype=np.int32),
        is_tree=np.array([False]),
    )
