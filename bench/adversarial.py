"""Text that nobody can foretell: every source under the planner against plain decoding.

    python bench/adversarial.py                    # batch 1, 8 and 32: some minutes
    python bench/adversarial.py --batch 4 --temperature 1.5

Prompts are random tokens, and answers are sampled so hot that they nearly are. Drafts bring nothing
here: what is lost is what looking for them costs. Both sides take turns with the same seeds, and
must write the same. The last line is {"<batch>": {"planner": …, "plain": …, "ratio": …}} in tokens
per second, medians over --rounds; the ratio is the median of those of each round.
"""

import argparse
import json
import random
from statistics import median

from common import alternate, amount, count

from outrider import LLM, SamplingParams
from outrider.bench.drive import drive
from outrider.cli.comparison import twin
from outrider.cli.options import parse_speculative_config

LEAST_REQUESTS = 8  # of a pass
PROMPT_TOKENS = 64


class Bench:
    """Requests of one batch size, and what either side made of them."""

    def __init__(self, vocab_size: int, batch: int, params: SamplingParams) -> None:
        pick = random.Random(1).randrange
        num = max(LEAST_REQUESTS, 2 * batch)
        self._prompts = [(i, [pick(vocab_size) for _ in range(PROMPT_TOKENS)]) for i in range(num)]
        self._batch = batch
        self._params = params
        self._texts: dict[int, list[int]] = {}

    def rate(self, llm: LLM) -> float:
        """Tokens per second of all requests, whose texts must be those of every other time."""
        done = drive(llm, self._prompts, self._params, self._batch)
        for answer in done.answers:
            same = self._texts.setdefault(answer.index, answer.token_ids)
            assert answer.token_ids == same, "speculation wrote another text"
        return done.num_tokens / done.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--speculative-config", default="auto")
    parser.add_argument("--batch", nargs="+", type=count, default=[1, 8, 32])
    parser.add_argument("--temperature", type=amount, default=2.0)
    parser.add_argument("--max-tokens", type=count, default=128)
    parser.add_argument("--rounds", type=count, default=7)
    given = parser.parse_args()
    config = parse_speculative_config(given.speculative_config)
    uncached = {"enable_prefix_caching": False}  # else a second pass finds the prompts of the first
    planner = LLM(speculative_config=config, max_num_seqs=max(given.batch), **uncached)
    plain = twin(planner, **uncached)
    for llm in (planner, plain):
        llm.engine.measure_costs()
    params = SamplingParams(
        temperature=given.temperature, seed=1, max_tokens=given.max_tokens, ignore_eos=True
    )
    found = {}
    for batch in given.batch:
        bench = Bench(planner.target.vocab_size, batch, params)
        sides = [lambda bench=bench, llm=llm: bench.rate(llm) for llm in (plain, planner)]
        alternate(1, *sides)  # warms up
        rates = alternate(given.rounds, *sides)
        ratios = [b / a for a, b in zip(*rates, strict=True)]
        medians = {"planner": round(median(rates[1]), 1), "plain": round(median(rates[0]), 1)}
        found[str(batch)] = medians | {"ratio": round(median(ratios), 3)}
        print(f"batch {batch}: {found[str(batch)]}, ratios {min(ratios):.3f} to "
              f"{max(ratios):.3f}", flush=True)  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
