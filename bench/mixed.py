"""Mixed traffic: the planner with all sources against each source alone at its best fixed length.

    python bench/mixed.py                          # lookup and the drafter that ships, minutes
    python bench/mixed.py --source '{"method": "table"}' --batch 1 8      # lookup and a table
    python bench/mixed.py --workload prompts.jsonl --plot mixed.svg -o mixed.json

Code edits, JSON, chat, maths and summaries are decoded with a fixed number of requests under way.
Every source alone drafts with each of --lengths once; its best length then takes turns with plain
decoding, the other sources and the planner. All texts must be the same. Medians over --rounds, in
tokens per second of a whole pass, in which every batch is filled --fill times: prompts come again
where there are too few. The last line is
{"<batch>": {"planner": …, "best_single": …, "plain": …}}.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, alternate, count, provenance

from outrider import LLM, SamplingParams
from outrider.bench.configs import default_name
from outrider.bench.drive import drive
from outrider.bench.workload import DEFAULT_WORKLOAD, encoded, read_workload
from outrider.cli.comparison import twin
from outrider.policy.fixed import FixedLength

KINDS = ("code edit", "json", "chat", "maths", "summary")
BATCHES, LENGTHS = (1, 4, 8, 16), (2, 4, 8, 16)
KV_TOKENS = 32768
SHIPPED = '{"method": "dspark"}'  # for the default target


@dataclass
class Side:
    """One way to decode, and how fast it was."""

    name: str
    llm: LLM
    rates: list[float] = field(default_factory=list)  # tokens per second by round
    by_kind: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return median(self.rates)


class Bench:
    """Prompts of some kinds, and engines on one target that decode them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        more = given.source or ([] if given.model else [SHIPPED])
        self.sources = [{"method": "lookup"}, *map(json.loads, more)]
        self.llm = self._llm(self.sources)  # the planner's; it loads the target and measures it
        paths = given.workload or [DEFAULT_WORKLOAD, HERE / "maths.jsonl"]
        workload = read_workload(paths, given.category or (), given.limit)
        kept = [p for p in workload.prompts if given.workload or p.category in KINDS]
        workload.prompts = kept
        self.kinds = [prompt.category for prompt in kept]
        self.params = SamplingParams(temperature=0, max_tokens=given.max_tokens)
        self.prompts = self._interleaved(encoded(self.llm, workload, given.max_tokens))
        self.plain = self._llm(None)
        self.texts: dict[int, list[int]] = {}

    def run(self, batch: int) -> list[Side]:
        """All sides at one batch size, the planner last."""
        singles = [self._best_length(config, batch) for config in self.sources]
        planner = Side("planner", self.llm)
        sides = [Side("plain", self.plain), *singles, planner]
        self._pass(planner, batch)  # sources and estimates warm up
        planner.rates.clear()
        planner.by_kind.clear()
        alternate(self.given.rounds, *(lambda side=side: self._pass(side, batch) for side in sides))
        return sides

    def _best_length(self, config: dict[str, Any], batch: int) -> Side:
        tried = []
        for length in self.given.lengths:
            llm = self._llm(config, FixedLength(length))
            if tried and length > max(s.max_draft_tokens for s in llm.engine.speculation.sources):
                break
            tried.append(Side(f"{default_name(config)}, {length} tokens", llm))
            self._pass(tried[-1], batch)
        best = max(tried, key=lambda side: side.rate)
        return Side(best.name, best.llm)

    def _pass(self, side: Side, batch: int) -> float:
        """Decode every prompt once; tokens per second. All sides must write the same texts."""
        wanted = max(len(self.prompts), self.given.fill * batch)
        prompts = [
            (i, self.prompts[i % len(self.prompts)][1]) for i in range(wanted)
        ]  # under ids of their own
        found = drive(side.llm, prompts, self.params, batch)
        for answer in found.answers:
            answer.index %= len(self.prompts)
            expected = self.texts.setdefault(answer.index, answer.token_ids)
            assert answer.token_ids == expected, (
                f"{side.name} wrote another text than plain decoding"
            )
        side.rates.append(found.num_tokens / found.seconds)
        for kind in dict.fromkeys(self.kinds):
            answers = [a for a in found.answers if self.kind_of(a.index) == kind]
            spans = [span for answer in answers for span in answer.spans()]
            seconds = sum(span.seconds for span in spans)
            if seconds:
                side.by_kind.setdefault(kind, []).append(sum(s.num_tokens for s in spans) / seconds)
        return side.rates[-1]

    def kind_of(self, place: int) -> str:
        """Of the prompt at a place of the list."""
        return self.kinds[self.prompts[place][0]]

    def _llm(self, config: Any, policy: FixedLength | None = None) -> LLM:
        # With KV kept, a second pass would find the prompts of the first.
        more: dict[str, Any] = {"policy": policy, "enable_prefix_caching": False}
        if hasattr(self, "llm"):
            llm = twin(self.llm, config, **more)
        else:
            seats = max(self.given.batch)
            llm = LLM(
                self.given.model,
                speculative_config=config,
                kv_cache_tokens=KV_TOKENS,
                max_num_seqs=seats,
                **more,
            )
        llm.engine.measure_costs()  # prompts are portioned by them, and must be so on all sides
        return llm

    def _interleaved(self, prompts: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
        """Kinds take turns, so that every batch is mixed."""
        seen: dict[str, int] = {}
        rank = {}
        for index, _ in prompts:
            kind = self.kinds[index]
            rank[index] = seen[kind] = seen.get(kind, 0) + 1
        return sorted(prompts, key=lambda prompt: rank[prompt[0]])


def show(batch: int, sides: list[Side]) -> None:
    """A table of one batch size."""
    plain, planner = sides[0].rate, sides[-1].rate
    best = max(side.rate for side in sides[1:-1])
    kinds = list(sides[0].by_kind)
    print(f"\nbatch {batch}: planner {planner / best:.2f}x of the best single source, "
          f"{planner / plain:.2f}x of plain decoding")  # fmt: skip
    print(f"  {'':24} {'tokens/s':>8}  " + "  ".join(f"{kind:>9}" for kind in kinds))
    for side in sides:
        ratios = (median(side.by_kind[k]) / median(sides[0].by_kind[k]) for k in kinds)
        print(f"  {side.name:24} {side.rate:8.0f}  " + "  ".join(f"{r:8.2f}x" for r in ratios))


def plot(results: dict[str, list[Side]], path: Path) -> None:
    """Tokens per second of every side by batch size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    rows = {
        "plain": [sides[0].rate for sides in results.values()],
        "best single source": [max(s.rate for s in sides[1:-1]) for sides in results.values()],
        "planner": [sides[-1].rate for sides in results.values()],
    }
    for i, (name, rates) in enumerate(rows.items()):
        axes.bar([x + 0.27 * (i - 1) for x in range(len(rates))], rates, 0.25, label=name)
    axes.set_xticks(range(len(results)), [f"batch {batch}" for batch in results])
    axes.set_ylabel("tokens per second")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="default: the default target")
    parser.add_argument(
        "--source", action="append", help=f"JSON of one more source; by default {SHIPPED}"
    )
    parser.add_argument("--workload", nargs="+", type=Path, help="JSONL of prompts instead")
    parser.add_argument("--category", action="append", help="only these")
    parser.add_argument("--limit", type=count, help="so many prompts, evenly spread")
    parser.add_argument("--batch", nargs="+", type=count, default=BATCHES)
    parser.add_argument("--lengths", nargs="+", type=count, default=LENGTHS, help="fixed lengths")
    parser.add_argument("--fill", type=count, default=4, help="requests per place of a batch")
    parser.add_argument("--max-tokens", type=count, default=96)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--plot", type=Path, help="an image of the table")
    parser.add_argument("-o", "--output", type=Path, help="all rounds as JSON")
    given = parser.parse_args()
    bench = Bench(given)
    results: dict[str, list[Side]] = {}
    for batch in given.batch:
        results[str(batch)] = sides = bench.run(batch)
        show(batch, sides)
    if given.plot:
        plot(results, given.plot)
    last = {
        batch: {
            "planner": round(sides[-1].rate, 1),
            "best_single": round(max(side.rate for side in sides[1:-1]), 1),
            "plain": round(sides[0].rate, 1),
        }
        for batch, sides in results.items()
    }
    if given.output:
        rounds = {b: {s.name: s.rates for s in sides} for b, sides in results.items()}
        whole = {"provenance": provenance(2), "rounds": rounds, "median": last}
        given.output.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(last))


if __name__ == "__main__":
    main()
