"""Measure what the README claims about the engine, each row against its rival in one run.

    python bench/engine.py                      all rows, about six minutes on 2 cores
    python bench/engine.py --only chat          one row
    python bench/engine.py --prompts FILE ...   JSONL with `category` and `turns`

Prints one Markdown table and writes results/bench-engine.json with every round and the
provenance. Two sides of a ratio take turns; what is shown is the ratio of medians.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import (
    CHAT,
    DEFAULT_PROMPTS,
    HERE,
    BenchPrompt,
    alternate,
    count,
    medians,
    pin,
    provenance,
    read_bandwidth,
    read_prompts,
    seconds,
)

from outrider import LLM, SamplingParams
from outrider.cli.answers import decode_rate
from outrider.cli.comparison import twin
from outrider.engine.times import StepTimes
from outrider.target.base import PAGE_SIZE, ForwardBatch

CONTEXT_TOKENS = 512  # of the forward whose cost is measured by rows
DECODE_TOKENS = 96
FIRST_TOKEN = (
    "from outrider import LLM, SamplingParams\n"
    "LLM({model!r}).generate('The', SamplingParams(max_tokens=1, temperature=0.0))\n"
)


@dataclass(slots=True)
class Row:
    """One line of the table."""

    what: str
    bar: str
    measured: str
    reached: bool
    details: dict[str, Any] = field(default_factory=dict)


class Bench:
    """The models under measurement, loaded once each."""

    def __init__(self, model: str | None, prompts: list[BenchPrompt], rounds: int) -> None:
        self.model = model
        self.prompts = prompts
        self.rounds = rounds

    @cached_property
    def plain(self) -> LLM:
        return LLM(self.model, speculative_config=None)

    @cached_property
    def speculative(self) -> LLM:
        return twin(self.plain, "auto")

    def of_kind(self, chat: bool) -> list[BenchPrompt]:
        chosen = [prompt for prompt in self.prompts if (prompt.category == CHAT) == chat]
        if not chosen:
            sys.exit(f"no prompts of category {CHAT!r} {'' if chat else 'other than this '}given")
        return chosen

    def rate(self, llm: LLM, prompt: BenchPrompt, ignore_eos: bool = True) -> float:
        """Greedy decoded tokens per second after the first token, batch 1."""
        params = SamplingParams(temperature=0.0, max_tokens=DECODE_TOKENS, ignore_eos=ignore_eos)
        rate = decode_rate(llm.chat([prompt.conversation], params)[0])
        assert rate is not None
        return rate


def plain_against_transformers(bench: Bench) -> list[Row]:
    """Plain decoding of one chat prompt by both, from the first token to the last."""
    hf_rate = _transformers_rate(bench)
    prompt = bench.of_kind(chat=True)[0]
    bench.rate(bench.plain, prompt)
    rates = alternate(bench.rounds, lambda: bench.rate(bench.plain, prompt), hf_rate)
    ours, theirs = medians(rates)
    return [
        Row(
            "plain decode, batch 1, against transformers generate (bf16, eager, SDPA)",
            "≥ 2.2×",
            f"{ours / theirs:.2f}× ({ours:.0f} against {theirs:.0f} tokens/s)",
            ours / theirs >= 2.2,
            {"ours": rates[0], "transformers": rates[1]},
        )
    ]


def plain_against_floor(bench: Bench) -> list[Row]:
    """Seconds to read all weights once, over the seconds of a plain step."""
    weight_bytes = bench.plain.target.weight_bytes
    prompt = bench.of_kind(chat=True)[0]
    bench.rate(bench.plain, prompt)
    rates = alternate(bench.rounds, lambda: bench.rate(bench.plain, prompt), read_bandwidth)
    rate, bandwidth = medians(rates)
    share = rate * weight_bytes / bandwidth
    return [
        Row(
            "plain decode, batch 1, against the floor (weight bytes over read bandwidth)",
            "≥ 50 %",
            f"{share:.0%} ({weight_bytes / 1e6:.0f} MB, {bandwidth / 1e9:.1f} GB/s)",
            share >= 0.5,
            {"tokens_per_second": rates[0], "bandwidth": rates[1], "weight_bytes": weight_bytes},
        )
    ]


def rows_of_a_forward(bench: Bench) -> list[Row]:
    """One forward with 8 rows against the cheaper of 1 and 2, at 512 tokens of context."""
    target = bench.plain.target
    sides = [lambda n=n: seconds(lambda: target.forward(_chain(n))) for n in (1, 2, 8)]
    for side in sides:
        side()
    times = alternate(10 * bench.rounds, *sides)
    one, two, eight = medians(times)
    ratio = eight / min(one, two)
    return [
        Row(
            "forward with 8 rows against the cheaper of 1 and 2 (512 tokens of context)",
            "≤ 1.3×",
            f"{ratio:.2f}× ({1e3 * one:.2f}, {1e3 * two:.2f}, {1e3 * eight:.2f} ms)",
            ratio <= 1.3,
            {"1": times[0], "2": times[1], "8": times[2]},
        )
    ]


def step_overhead(bench: Bench) -> list[Row]:
    """Share of the step time that is neither forward nor drafts."""
    rows = []
    for name, bar, params in (
        ("greedy", 0.05, SamplingParams(temperature=0.0)),
        ("temperature 0.8, top-p 0.95", 0.10, SamplingParams(temperature=0.8, top_p=0.95, seed=1)),
    ):
        params = replace(params, max_tokens=DECODE_TOKENS, ignore_eos=True)
        shares: dict[str, float] = {}
        for kind, llm in (("plain", bench.plain), ("speculative", bench.speculative)):
            for batch in (1, 16):
                shares[f"{kind}, batch {batch}"] = _overhead(bench, llm, batch, params)
        rows.append(
            Row(
                f"step time outside forward and drafts, {name}",
                f"≤ {bar:.0%}",
                " · ".join(f"{kind} {share:.1%}" for kind, share in shares.items()),
                max(shares.values()) <= bar,
                dict(shares),
            )
        )
    return rows


def deterministic_cost(bench: Bench) -> list[Row]:
    """Time of deterministic execution over time of the other, plain and speculative."""
    free = LLM(bench.model, speculative_config=None, deterministic=False)
    fixed = LLM(bench.model, speculative_config=None, deterministic=True)
    rows = []
    prompt = bench.of_kind(chat=False)[0]
    for kind, config in (("plain", None), ("speculative", "auto")):
        pair = [twin(llm, config) for llm in (fixed, free)]
        for llm in pair:
            bench.rate(llm, prompt)
        rates = alternate(bench.rounds, *[lambda m=m: bench.rate(m, prompt) for m in pair])
        with_it, without = medians(rates)
        rows.append(
            Row(
                f"deterministic execution against not, {kind}",
                "≤ 10 % slower",
                f"{without / with_it - 1:+.1%} time ({with_it:.0f}, {without:.0f} tokens/s)",
                without / with_it <= 1.10,
                {"deterministic": rates[0], "not": rates[1]},
            )
        )
    return rows


def start_up(bench: Bench) -> list[Row]:
    """A new process from its start to its first token, with an empty and with a filled cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"OUTRIDER_CACHE": cache}
        command = [sys.executable, "-c", FIRST_TOKEN.format(model=bench.model)]

        def once() -> float:
            return seconds(lambda: subprocess.run(command, env=environment, check=True))

        cold = once()
        warm = [once() for _ in range(3)]
    return [
        Row("start-up to the first token, cold cache", "≤ 20 s", f"{cold:.1f} s", cold <= 20),
        Row(
            "start-up to the first token, warm cache",
            "≤ 5 s",
            f"{median(warm):.1f} s",
            median(warm) <= 5,
            {"rounds": warm},
        ),
    ]


def repeating_prompts(bench: Bench) -> list[Row]:
    """Code edits, JSON and copies: speculative against plain, every prompt on its own."""
    result = _speedups(bench, bench.of_kind(chat=False), bench.rounds)
    total = result.total
    kinds = " · ".join(f"{kind} {value:.2f}×" for kind, value in result.by_kind().items())
    return [
        Row(
            "code-edit, JSON and copy prompts, speculative against plain, batch 1",
            "≥ 2.5×",
            f"{total:.2f}× ({kinds})",
            total >= 2.5,
            asdict(result),
        )
    ]


def chat(bench: Bench) -> list[Row]:
    """Open chat: the worst prompt's ratio counts; 3 % takes more rounds to see."""
    result = _speedups(bench, bench.of_kind(chat=True), 3 * bench.rounds)
    worst = min(result.ratios)
    return [
        Row(
            "open chat: speculative against plain, batch 1, worst prompt",
            "≥ 0.97×",
            f"{worst:.2f}× (all together {result.total:.2f}×)",
            worst >= 0.97,
            asdict(result),
        )
    ]


def lookup(bench: Bench) -> list[Row]:
    """Lookup against arctic-inference's suffix cache, by the script of that comparison."""
    script = HERE / "lookup_vs_suffix_cache.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{script.name} failed:\n{done.stderr[-2000:]}")
    speeds = re.findall(r"^ +(.+): ([\d.]+)× by medians", done.stdout, re.MULTILINE)
    tokens = re.findall(r"([\d.]+)× or more", done.stdout)
    assert speeds and tokens, done.stdout
    ratios = [float(ratio) for _, ratio in speeds]
    shown = " · ".join(f"{history} {ratio}×" for history, ratio in speeds)
    return [
        Row(
            "lookup propose at 100 k tokens of history against arctic-inference; tokens per step",
            "≥ 5× faster; ≥ 1×",
            f"{shown}; {tokens[0]}×",
            min(ratios) >= 5 and float(tokens[0]) >= 1,
            {"output": done.stdout},
        )
    ]


def lossless(bench: Bench) -> list[Row]:
    """Speculative text = plain text; bench/lossless.py runs more of it."""
    from lossless import check

    report = check(bench.model, bench.prompts, num_prompts=300, share=True)
    return [
        Row(
            "speculative text = plain text (sources, chains and trees, batch 1 and 8)",
            "100 %",
            f"{report.num_same} of {report.num_answers} answers",
            report.num_same == report.num_answers,
            report.as_json(),
        )
    ]


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "transformers": plain_against_transformers,
    "floor": plain_against_floor,
    "rows": rows_of_a_forward,
    "overhead": step_overhead,
    "deterministic": deterministic_cost,
    "start-up": start_up,
    "repeating": repeating_prompts,
    "chat": chat,
    "lookup": lookup,
    "lossless": lossless,
}


@dataclass(slots=True)
class Speedups:
    """Median rates of each prompt, plain and speculative."""

    kinds: list[str]
    plain: list[float]
    speculative: list[float]

    @property
    def ratios(self) -> list[float]:
        return [fast / slow for fast, slow in zip(self.speculative, self.plain, strict=True)]

    @property
    def total(self) -> float:
        """Ratio of the times that the same number of tokens of every prompt takes."""
        return sum(1 / rate for rate in self.plain) / sum(1 / rate for rate in self.speculative)

    def by_kind(self) -> dict[str, float]:
        """Median ratio of each kind of prompt."""
        kinds = sorted(set(self.kinds))
        pairs = list(zip(self.kinds, self.ratios, strict=True))
        return {kind: median(ratio for k, ratio in pairs if k == kind) for kind in kinds}


def _speedups(bench: Bench, prompts: Sequence[BenchPrompt], rounds: int) -> Speedups:
    """Answers end where the model ends them: what follows repeats itself, and drafts too well."""
    result = Speedups([prompt.category for prompt in prompts], [], [])
    for prompt in prompts:
        sides = [
            lambda m=m, p=prompt: bench.rate(m, p, ignore_eos=False)
            for m in (bench.plain, bench.speculative)
        ]
        for side in sides:
            side()
        slow, fast = medians(alternate(rounds, *sides))
        result.plain.append(slow)
        result.speculative.append(fast)
    return result


def _overhead(bench: Bench, llm: LLM, batch: int, params: SamplingParams) -> float:
    prompts = [bench.prompts[i % len(bench.prompts)].conversation for i in range(batch)]
    times: StepTimes = llm.engine.times
    before = replace(times)
    llm.chat(prompts, params)
    return (times.overhead - before.overhead) / (times.total - before.total)


def _chain(num_rows: int) -> ForwardBatch:
    """New rows of one request behind its context; the KV holds whatever was there."""
    num_pages = -(-(CONTEXT_TOKENS + num_rows) // PAGE_SIZE)
    return ForwardBatch(
        token_ids=np.arange(100, 100 + num_rows, dtype=np.int32),
        positions=np.arange(CONTEXT_TOKENS, CONTEXT_TOKENS + num_rows, dtype=np.int32),
        row_starts=np.array([0, num_rows], np.int32),
        context_lens=np.array([CONTEXT_TOKENS], np.int32),
        page_tables=[np.arange(num_pages, dtype=np.int32)],
        parents=np.arange(-1, num_rows - 1, dtype=np.int32),
        logits_rows=np.arange(num_rows, dtype=np.int32),
        is_tree=np.array([False]),
    )


def _transformers_rate(bench: Bench) -> Callable[[], float]:
    """Tokens per second of transformers' generate after its first token."""
    from time import perf_counter

    from outrider.target.load import load_model

    model = load_model(bench.model, "bfloat16").hf_model()
    model.set_attn_implementation("sdpa")
    prompt = bench.of_kind(chat=True)[0]
    tokenizer = bench.plain.tokenizer
    text = tokenizer.chat(prompt.conversation)
    input_ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])

    class Clock:
        """Stands in for a streamer: the prompt comes first, then each token."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: torch.Tensor) -> None:
            self.times.append(perf_counter())

        def end(self) -> None:
            pass

    def rate() -> float:
        clock = Clock()
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            min_new_tokens=DECODE_TOKENS,
            max_new_tokens=DECODE_TOKENS,
            streamer=clock,
            pad_token_id=0,
        )
        return (DECODE_TOKENS - 1) / (clock.times[-1] - clock.times[1])

    rate()
    return rate


def as_markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """The table, and one line about where it was measured."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = ["| what | at least | measured | reached |", "|---|---|---|---|"]
    lines += [
        f"| {row.what} | {row.bar} | {row.measured} | {'yes' if row.reached else '**no**'} |"
        for row in rows
    ]
    where = f"{about['cpu']}, {about['threads']} threads, {about['date'][:10]}; {versions}"
    return "\n".join([*lines, "", where])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the default target")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[DEFAULT_PROMPTS])
    parser.add_argument("--limit", type=count, help="take this many prompts, evenly spread")
    parser.add_argument("--only", choices=ROWS, nargs="+", default=list(ROWS))
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--output", type=Path, default=Path("results/bench-engine.json"))
    arguments = parser.parse_args()
    pin(arguments.threads)
    about = provenance(arguments.threads)
    bench = Bench(
        arguments.model, read_prompts(arguments.prompts, arguments.limit), arguments.rounds
    )
    rows = []
    for name in arguments.only:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows += ROWS[name](bench)
    print(as_markdown(rows, about))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"provenance": about, "rows": [asdict(row) for row in rows]}
    arguments.output.write_text(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
