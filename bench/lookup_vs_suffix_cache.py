"""LookupSource against the suffix cache of arctic-inference on the same token streams.

    pip install --no-deps arctic-inference==0.3.0
    python bench/lookup_vs_suffix_cache.py              about two minutes

First table: microseconds per request of one propose at 10 k and 100 k tokens of history, alone
and in a batch of 16, both sides alternating on the same steps of texts of four kinds, equally
many of each. Ours is all a user of LookupSource pays: the Python call, taking in the new tokens,
drafting. Theirs is `speculate` with `add_active_response`, which takes in the tokens, and in
brackets `speculate` alone. History is the request's own prompt, or outputs of earlier requests.

Second table: tokens per step and draft tokens per step when texts are replayed one after
another, each side knowing the earlier ones; draft budget 16, everything else as each side has it
by default, and then with all limits on the draft taken off.

Last lines: both against their bars. Results and provenance go to results/bench-lookup.json.
"""

import argparse
import json
import math
import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from time import perf_counter
from typing import Any

import numpy as np
from common import HERE, count, pin, provenance

from outrider.drafting.lookup import LookupSource
from outrider.drafting.source import Draft, DraftContext, Outcome
from outrider.sampling_params import SamplingParams
from outrider.target.load import load_model

BUDGET = 16
WARM_STEPS, TIMED_STEPS = 5, 40  # an edit is said in 60
PROMPT_SHARE = 0.1  # of a replayed text that is given as its prompt
SPEED_BAR, TOKENS_BAR = 5.0, 1.0


# ---- texts


def python_files(count: int) -> list[str]:
    """Source files of the standard library, 8 to 60 kB."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(root.glob("*.py")) if 8_000 < f.stat().st_size < 60_000]
    random.Random(0).shuffle(files)
    return [f.read_text(encoding="utf-8", errors="replace") for f in files[:count]]


def descriptions(count: int) -> list[str]:
    """Long descriptions of the installed packages: prose with some markup."""
    root = Path(sysconfig.get_path("purelib"))
    files = [f for f in sorted(root.glob("*.dist-info/METADATA")) if f.stat().st_size > 6_000]
    return [f.read_text(encoding="utf-8", errors="replace")[:30_000] for f in files[:count]]


def records(count: int) -> list[str]:
    rng = random.Random(1)
    return [
        json.dumps(
            [
                {
                    "id": number + row,
                    "name": rng.choice(["alice", "bob", "carol", "dave"]),
                    "score": rng.randrange(100),
                    "tags": rng.sample(["new", "old", "red", "blue"], 2),
                    "active": rng.random() < 0.5,
                }
                for row in range(30)
            ],
            indent=2,
        )
        for number in range(count)
    ]


def edits(files: Sequence[str]) -> list[tuple[str, str]]:
    """A part of a file, and the same part with two names changed and three lines edited."""
    rng = random.Random(2)
    pairs = []
    for text in files:
        start = rng.randrange(max(1, len(text) - 4_000))
        before = text[start : start + 3_500]
        names = sorted({n for n in re.findall(r"\b[a-z_]{4,}\b", before) if before.count(n) > 3})
        after = before
        for name in rng.sample(names, min(2, len(names))):
            after = re.sub(rf"\b{name}\b", f"{name}_new", after)
        lines = after.split("\n")
        del lines[rng.randrange(len(lines) - 2)]
        lines.insert(rng.randrange(len(lines)), "    # note: checked by hand")
        changed = rng.randrange(len(lines))
        lines[changed] = lines[changed].replace("self", "this").replace("if", "while")
        pairs.append((before, "\n".join(lines)))
    return pairs


@dataclass(frozen=True, slots=True)
class Stream:
    """One request to replay: what it is given, and what it will say (int32 ids)."""

    prompt: np.ndarray
    output: np.ndarray


def make_streams(encode: Callable[[str], np.ndarray], count: int) -> dict[str, list[Stream]]:
    def whole(texts: Sequence[str]) -> list[Stream]:
        coded = [encode(text)[:4_000] for text in texts]
        cuts = [max(1, int(PROMPT_SHARE * len(ids))) for ids in coded]
        return [Stream(ids[:cut], ids[cut:]) for ids, cut in zip(coded, cuts, strict=True)]

    files = python_files(count)
    return {
        "source files": whole(files),
        "descriptions": whole(descriptions(count)),
        "JSON": whole(records(count)),
        "edits": [Stream(encode(before), encode(after)) for before, after in edits(files)],
    }


def make_past(encode: Callable[[str], np.ndarray]) -> np.ndarray:
    """100 k tokens of the same kinds, of other texts where there are enough, in turns."""
    kinds = [python_files(48)[24:], descriptions(48)[24:], records(48)[24:]]
    parts = [encode(text)[:4_000] for texts in zip(*kinds, strict=False) for text in texts]
    return np.resize(np.concatenate(parts), 100_000)


# ---- the two sides


class Ours:
    def __init__(self, shared_tokens: int = 1_000_000, **options: Any) -> None:
        self.source = LookupSource(BUDGET, shared_tokens=shared_tokens, **options)
        self.params = SamplingParams()
        self.contexts: dict[str, DraftContext] = {}  # one per request, as in the engine

    def start(self, name: str, text: np.ndarray, num_prompt: int) -> None:
        context = DraftContext(name, text[:num_prompt], num_prompt, self.params)
        self.contexts[name] = context
        self.source.propose([context], [0])

    def context(self, name: str, text: np.ndarray) -> DraftContext:
        context = self.contexts[name]
        context.token_ids = text
        return context

    def propose(self, name: str, text: np.ndarray) -> Draft:
        return self.source.propose([self.context(name, text)], [BUDGET])[0]

    def observe(self, name: str, draft: Draft, num_accepted: int, new: np.ndarray) -> None:
        if draft.token_ids:
            self.source.observe([Outcome(name, draft, num_accepted, new.tolist())])

    def finish(self, name: str, text: np.ndarray) -> None:
        self.source.finish(self.context(name, text))
        self.source.release(name)


class Theirs:
    def __init__(self, depth: int, **limits: float) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=depth)
        self.depth, self.limits = depth, limits

    def start(self, name: str, text: np.ndarray, num_prompt: int) -> None:
        self.cache.start_request(name, text[:num_prompt])

    def add(self, name: str, new: np.ndarray) -> None:
        self.cache.add_active_response(name, new)

    def propose(self, name: str, text: np.ndarray) -> list[int]:
        context = text[-self.depth :]
        return self.cache.speculate(name, context, BUDGET, **self.limits).token_ids

    def finish(self, name: str) -> None:
        self.cache.stop_request(name)


def num_agreeing(draft: Sequence[int], rest: np.ndarray) -> int:
    """Draft tokens before the first wrong one."""
    n = min(len(draft), len(rest))
    wrong = np.flatnonzero(np.array(draft[:n], np.int32) != rest[:n])
    return int(wrong[0]) if len(wrong) else n


# ---- time


@dataclass(slots=True)
class Timing:
    """Microseconds per request of every step."""

    history: str
    num_tokens: int
    batch: int
    ours: list[float]
    theirs: list[float]  # taking in the new tokens and speculating, as ours does
    speculate: list[float]

    @property
    def ratio(self) -> float:
        return median(self.theirs) / median(self.ours)

    @property
    def ratio_of_means(self) -> float:
        """Of the time all steps took together, but for the slowest 2 %: those were interrupted."""
        return _trimmed_mean(self.theirs) / _trimmed_mean(self.ours)

    def row(self) -> str:
        sides = [f"{median(us):.1f} / {p99(us):.1f}" for us in (self.ours, self.theirs)]
        return (
            f"| {self.history} | {self.num_tokens:,} | {self.batch} | {sides[0]} | {sides[1]} "
            f"({median(self.speculate):.1f}) | {self.ratio:.1f}× | {self.ratio_of_means:.1f}× |"
        )


def _trimmed_mean(values: Sequence[float]) -> float:
    return mean(sorted(values)[: math.ceil(0.98 * len(values))])


def p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[98]


@dataclass(slots=True)
class Running:
    """A request in the middle of its replay."""

    name: str
    text: np.ndarray
    known: int  # tokens both sides have taken in
    place: int  # tokens said


def time_side_by_side(
    streams: Sequence[Sequence[Stream]], past: np.ndarray, history: str, batch: int, depth: int
) -> Timing:
    """Replay requests of every kind with this past, step by step, both sides in turns."""
    ours, theirs = Ours(), Theirs(depth)
    timing = Timing(history, len(past), batch, [], [], [])
    if history == "earlier outputs":
        _remember(ours, theirs, past)
    groups = [of_kind[:1] for of_kind in streams]
    if batch > 1:
        groups = [[kind[i] for kind in streams for i in range(batch // len(streams))]]
    for number, group in enumerate(groups):
        running = []
        for i, stream in enumerate(group):
            prompt = stream.prompt
            if history == "own prompt":
                prompt = np.concatenate([past[: len(past) - len(prompt)], prompt])
            text = np.concatenate([prompt, stream.output])
            running.append(Running(f"{number}.{i}", text, len(prompt), len(prompt) + 1))
            ours.start(running[-1].name, text, len(prompt))
            theirs.start(running[-1].name, text, len(prompt))
        for step in range(WARM_STEPS + TIMED_STEPS):
            spent = _one_step(ours, theirs, running, ours_first=step % 2 == 0)
            if step >= WARM_STEPS:
                for values, seconds in zip(
                    (timing.ours, timing.theirs, timing.speculate), spent, strict=True
                ):
                    values.append(1e6 * seconds / len(group))
    return timing


def _one_step(
    ours: Ours, theirs: Theirs, running: Sequence[Running], ours_first: bool
) -> tuple[float, float, float]:
    """Seconds of our propose, of their add and speculate, and of speculate alone."""
    contexts = [ours.context(r.name, r.text[: r.place]) for r in running]
    budgets = [BUDGET] * len(running)
    drafts: list[Draft] = []
    mine = 0.0
    if ours_first:
        mine = _seconds(lambda: drafts.extend(ours.source.propose(contexts, budgets)))
    added = _seconds(lambda: [theirs.add(r.name, r.text[r.known : r.place]) for r in running])
    speculate = _seconds(lambda: [theirs.propose(r.name, r.text[: r.place]) for r in running])
    if not ours_first:
        mine = _seconds(lambda: drafts.extend(ours.source.propose(contexts, budgets)))
    for request, draft in zip(running, drafts, strict=True):
        accepted = num_agreeing(draft.token_ids, request.text[request.place :])
        new = request.text[request.place : request.place + accepted + 1]
        ours.observe(request.name, draft, accepted, new)
        request.known = request.place
        request.place = min(request.place + accepted + 1, len(request.text) - 1)
    return mine, added + speculate, speculate


def _remember(ours: Ours, theirs: Theirs, text: np.ndarray) -> None:
    """Make outputs of earlier requests of a text, 1,000 tokens each."""
    for start in range(0, len(text), 1_000):
        name, part = f"old{start}", text[start : start + 1_000]
        ours.start(name, part, 1)
        ours.finish(name, part)
        theirs.start(name, part, 1)
        theirs.add(name, part[1:])
        theirs.finish(name)


def _seconds(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


# ---- tokens


@dataclass(slots=True)
class Count:
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps

    @property
    def drafts_per_step(self) -> float:
        return self.num_drafts / self.num_steps


def replay_ours(streams: Sequence[Stream], side: Ours) -> Count:
    count = Count()
    for i, stream in enumerate(streams):
        text, start = np.concatenate([stream.prompt, stream.output]), len(stream.prompt)
        side.start(name := str(i), text, start)
        place = start
        while place < len(text):
            draft = side.propose(name, text[:place])
            accepted = num_agreeing(draft.token_ids, text[place:])
            new = text[place : place + accepted + 1]
            side.observe(name, draft, accepted, new)
            _count(count, len(new), len(draft))
            place += len(new)
        side.finish(name, text)
    return count


def replay_theirs(streams: Sequence[Stream], side: Theirs) -> Count:
    count = Count()
    for i, stream in enumerate(streams):
        text, start = np.concatenate([stream.prompt, stream.output]), len(stream.prompt)
        side.start(name := str(i), text, start)
        place = start
        while place < len(text):
            draft = side.propose(name, text[:place])
            new = text[place : place + num_agreeing(draft, text[place:]) + 1]
            side.add(name, new)
            _count(count, len(new), len(draft))
            place += len(new)
        side.finish(name)
    return count


def _count(count: Count, num_new: int, num_drafts: int) -> None:
    count.num_tokens += num_new
    count.num_steps += 1
    count.num_drafts += num_drafts


# ---- report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=count, default=16, help="texts of each kind")
    parser.add_argument("--depth", type=count, default=64, help="of their tree (vLLM: 24)")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results/bench-lookup.json")
    options = parser.parse_args()
    pin(1)
    tokenizer = load_model(None).tokenizer
    assert tokenizer is not None

    def encode(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text), np.int32)

    streams = make_streams(encode, options.texts)
    timings = report_times(list(streams.values()), make_past(encode), options.depth)
    counts = report_tokens(streams, options.depth)
    shares = [
        mine.tokens_per_step / other.tokens_per_step
        for pairs in counts.values()
        for mine, other in pairs
    ]
    print(f"\npropose at 100 k tokens against theirs, bar {SPEED_BAR}×:")
    for timing in timings:
        if timing.num_tokens == 100_000:
            ratios = f"{timing.ratio:.1f}× by medians, {timing.ratio_of_means:.1f}× by means"
            print(f"  {timing.history}, batch {timing.batch}: {ratios}")
    print(f"tokens per step against theirs, bar {TOKENS_BAR}×: {min(shares):.3f}× or more")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "timings": [asdict(timing) for timing in timings],
        "tokens": {name: [[asdict(c) for c in pair] for pair in p] for name, p in counts.items()},
        "provenance": provenance(1),
    }
    options.out.write_text(json.dumps(found, indent=1))


def report_times(streams: Sequence[Sequence[Stream]], past: np.ndarray, depth: int) -> list[Timing]:
    print("µs per request, median / p99\n")
    print("| history | tokens | batch | ours | theirs (speculate alone) | medians | means |")
    print("|---|---|---|---|---|---|---|")
    timings = []
    for history in ("own prompt", "earlier outputs"):
        for num_tokens in (10_000, 100_000):
            for batch in (1, 16):
                timing = time_side_by_side(streams, past[:num_tokens], history, batch, depth)
                timings.append(timing)
                print(timing.row(), flush=True)
    return timings


def report_tokens(
    streams: dict[str, list[Stream]], depth: int
) -> dict[str, list[tuple[Count, Count]]]:
    """Per kind: both sides as they are by default, and both without limits on the draft."""
    print("\ntokens per step (draft tokens per step)\n")
    print("| texts | ours | theirs | ours, unlimited | theirs, unlimited |")
    print("|---|---|---|---|---|")
    counts = {}
    for name, of_kind in streams.items():
        default = (replay_ours(of_kind, Ours()), replay_theirs(of_kind, Theirs(depth)))
        limits = {"max_spec_factor": float(BUDGET), "min_token_prob": 0.0}
        unlimited = (
            replay_ours(of_kind, Ours(min_survival=0.0)),
            replay_theirs(of_kind, Theirs(depth, **limits)),
        )
        counts[name] = [default, unlimited]
        cells = [f"{c.tokens_per_step:.2f} ({c.drafts_per_step:.1f})" for c in default + unlimited]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return counts


if __name__ == "__main__":
    main()
