"""A server under load, with clients that hang up or send nonsense, and a source that crashes.

    python bench/soak.py                          # 60 s at 95 % of what the server sustains
    python bench/soak.py --seconds 1800           # the long form: make soak MINUTES=30
    python bench/soak.py --burst                  # 95 %, 4 × as much for 20 s, and 95 % again

First every chat is decoded plainly and alone, which is the text that it must have under load too.
Then as many calls as there are seats say what the server sustains, in calls per second. Rules are
replaced every other second. The table sets the server's metrics beside what the client saw, who
shares the CPUs with it. The exit status is 1 where a bar is missed; the last line is JSON.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from common import amount, count
from load import CHAT, ServerProcess, call, scrape
from traffic import MAX_BODY_BYTES, POLICIES, Caller, Outcome, make_cases

SEATS = 8
LOAD, BURST = 0.95, 4.0  # of what is sustained
FAULTS_PER_CALL = 0.1
WARM_UP_SECONDS = 3.0  # before anything is measured
WARM_UP = 0.3  # of the time, after which memory may not grow
SETTLE_SECONDS = 15.0
NUM_WRONG_SHOWN = 5
SOURCES = json.dumps(["auto", {"method": "bench.flaky:Flaky"}])
OPTIONS = (
    *("--speculative-config", SOURCES, "--max-num-seqs", str(SEATS), "--max-waiting", str(SEATS)),
    *("--max-body-bytes", str(MAX_BODY_BYTES), "--kv-cache-tokens", "6144"),
)


class ServerEnded(Exception):
    """The server has ended before it was asked to."""


@dataclass
class Soak:
    """One server, the calls it got, and what was seen of it meanwhile."""

    server: ServerProcess
    caller: Caller
    outcomes: list[Outcome] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # when, resident bytes
    num_policies: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    async def sustain(self, seconds: float) -> float:
        """Calls per second with all seats taken."""
        end = perf_counter() + seconds
        done = 0

        async def one_seat() -> None:
            nonlocal done
            while perf_counter() < end:
                self.check()
                self.outcomes.append(await self.caller.work())
                done += 1

        start = perf_counter()
        await asyncio.gather(*(one_seat() for _ in range(SEATS)))
        return done / (perf_counter() - start)

    async def load(self, rate: float, seconds: float) -> None:
        """So many calls per second that do work, evenly but for chance, and faults beside them."""
        at = start = perf_counter()
        while at < start + seconds:
            await asyncio.sleep(max(0.0, at - perf_counter()))
            self.check()
            self._begin(self.caller.work)
            if self._random.random() < FAULTS_PER_CALL:
                self._begin(self.caller.fault)
            at += self._random.uniform(0.5, 1.5) / rate

    async def finish(self) -> None:
        """Until every call has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.check()

    def check(self) -> None:
        """Raise ServerEnded where nobody is there to be asked."""
        if self.server.has_ended:
            raise ServerEnded

    def _begin(self, kind: Callable[[], Any]) -> None:
        async def run() -> None:
            self.outcomes.append(await kind())

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def meddle(self) -> None:
        """Replace the rules again and again, and look at the live view."""
        while True:
            for policy in POLICIES:
                reply = await call(self.server.port, "/policy", policy, "PUT")
                self.num_policies += reply.status == 200
                await call(self.server.port, "/live", b"", "GET")
                await asyncio.sleep(2.0)

    async def watch(self) -> None:
        """Note the memory of the server."""
        while not self.server.has_ended:
            self.memory.append((perf_counter(), self.server.resident_bytes))
            await asyncio.sleep(0.5)

    async def leaked(self) -> dict[str, float]:
        """What is still held when nothing is asked for any more; nothing, if all is well."""
        end = perf_counter() + SETTLE_SECONDS
        while True:
            reply = await call(self.server.port, "/live", b"", "GET")
            self.check()
            held = _held(reply.body()) if reply.status == 200 else {"calls of /live": 1.0}
            if not held or perf_counter() > end:
                return held
            await asyncio.sleep(0.2)


def _held(live: dict[str, Any]) -> dict[str, float]:
    """What a live view shows that somebody holds."""
    kv, requests = live["kv"], live["requests"]
    held = {f"KV of {name}": tokens for name, tokens in kv["zones"].items()}
    held |= {"pages": kv["num_held"], "running": requests["num_running"]}
    held |= {"waiting": requests["num_waiting"]}
    return {name: count for name, count in held.items() if count}


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that has to hold."""

    name: str
    value: float
    most: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.most


async def soak(server: ServerProcess, caller: Caller, given: argparse.Namespace) -> list[Bar]:
    """Every bar; of a server that ends early those alone that can still be judged."""
    run = Soak(server, caller)
    bars: list[Bar] = []
    with suppress(ServerEnded):
        bars = await _measured(run, given)
    with suppress(ServerEnded):
        await run.finish()
    faults = [one.fault for one in run.outcomes if one.fault]
    for fault in faults[:NUM_WRONG_SHOWN]:
        print("wrong:", fault)
    has_ended = Bar("server that ended", float(server.has_ended), 0)
    return [has_ended, Bar("wrong answers", len(faults), 0), *bars]


async def _measured(run: Soak, given: argparse.Namespace) -> list[Bar]:
    """Everything that is measured of a server that lives."""
    server = run.server
    await run.sustain(WARM_UP_SECONDS)
    rate = await run.sustain(given.sustain_seconds)
    print(f"sustained: {rate:.2f} calls/s with {SEATS} seats", flush=True)
    await run.leaked()
    run.outcomes.clear()
    before = await scrape(server.port)
    beside = [asyncio.create_task(one()) for one in (run.meddle, run.watch)]
    start = perf_counter()
    bars: list[Bar] = []
    if given.burst:
        bars = await _burst(run, rate, given.burst_seconds)
    else:
        await run.load(LOAD * rate, given.seconds)
    end = perf_counter()
    await run.finish()
    for task in beside:
        task.cancel()
    leaked = await run.leaked()
    _compare(run.outcomes, before, await scrape(server.port))
    print(f"rules replaced {run.num_policies} times; left behind: {leaked or 'nothing'}")
    gaps = [gap for one in run.outcomes for gap in one.gaps]
    middle, late = quantile(gaps, 0.5), quantile(gaps, 0.99)
    print(f"between tokens: P50 {1e3 * middle:.1f} ms, P99 {1e3 * late:.1f} ms")
    bars.append(Bar("slots and pages left behind", sum(leaked.values()), 0))
    if not given.burst:
        bars.append(Bar("P99 between tokens over P50", late / middle, 3.0, "×"))
        bars.append(Bar("growth of memory", 100 * _growth(run.memory, start, end), 2.0, "%"))
    return bars


async def _burst(run: Soak, rate: float, seconds: float) -> list[Bar]:
    """95 % for a while, four times what is sustained, and 95 % again; each so long."""
    edges = [perf_counter()]
    for share in (LOAD, BURST, LOAD):
        await run.load(share * rate, seconds)
        edges.append(perf_counter())
    await run.finish()
    phases = [
        [one for one in run.outcomes if start <= one.sent < end] for start, end in pairwise(edges)
    ]
    before, burst = (quantile([one.seconds for one in phase if one.is_whole], 0.99)
                     for phase in phases[:2])  # fmt: skip
    slowest = max((one.first for one in phases[0] if one.is_whole), default=0.0)
    troubled = [one.sent for one in phases[2] if one.status == 429 or one.first > slowest]
    recovery = max(troubled, default=edges[2]) - edges[2]
    counts = [Counter(one.status for one in phase) for phase in phases]
    for name, phase in zip(("before", "burst", "behind"), counts, strict=True):
        print(f"{name}: {phase[200]} admitted, {phase[429]} refused with 429")
    print(f"whole answers, P99: before {before:.2f} s, burst {burst:.2f} s")
    return [
        Bar("P99 of admitted calls over that before", burst / before, 3.0, "×"),
        Bar("recovery", recovery, 10.0, "s"),
        Bar("burst that nobody was refused in", float(not counts[1][429]), 0),
    ]


def _growth(memory: Sequence[tuple[float, int]], start: float, end: float) -> float:
    """Share by which memory grew from the end of the warm-up to the end of the load."""
    begin = start + WARM_UP * (end - start)
    part = (end - begin) / 3
    early = [size for time, size in memory if begin <= time < begin + part]
    late = [size for time, size in memory if end - part <= time < end]
    return statistics.median(late) / statistics.median(early) - 1


def _compare(
    outcomes: Sequence[Outcome], before: dict[str, float], after: dict[str, float]
) -> None:
    """Print what the server counted beside what the client saw."""
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def total(name: str, *labels: str) -> float:
        found = [series for series in gained if series.partition("{")[0] == name]
        return sum(gained[one] for one in found if all(label in one for label in labels))

    def mean(name: str) -> float:
        name = f"vllm:{name}_seconds"
        return 1e3 * total(f"{name}_sum") / max(1.0, total(f"{name}_count"))

    whole = [one for one in outcomes if one.is_whole]
    firsts = [one.first for one in whole if one.first]
    seconds = [one.seconds for one in whole]
    gaps = [gap for one in whole for gap in one.gaps]
    statuses = Counter(one.status for one in outcomes)
    calls = "outrider_http_requests_total"
    refused = [
        (f"calls with {status}", total(calls, f'status="{status}"', f'"{CHAT}"'), statuses[status])
        for status in (400, 429)
    ]
    tokens = total("vllm:request_generation_tokens_sum")
    rows = [
        ("answers", total("vllm:request_success_total"), len(whole)),
        ("their tokens", tokens, sum(one.num_tokens for one in whole)),
        *refused,
        ("to the first token, mean ms", mean("time_to_first_token"), _mean_ms(firsts)),
        ("between tokens, mean ms", mean("inter_token_latency"), _mean_ms(gaps)),
        ("whole answer, mean ms", mean("e2e_request_latency"), _mean_ms(seconds)),
    ]
    print(f"\n{'':30}{'server':>10}{'client':>10}{'client − server':>17}")
    for name, ours, theirs in rows:
        print(f"{name:30}{ours:10.1f}{theirs:10.1f}{theirs - ours:+17.1f}")
    print(
        "(a client that has hung up sees no status, and sends before the server's clock starts)\n"
    )


def _mean_ms(values: Sequence[float]) -> float:
    return 1e3 * statistics.fmean(values) if values else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=amount, default=60.0)
    parser.add_argument("--sustain-seconds", type=amount, default=10.0)
    parser.add_argument("--cases", type=count, default=24)
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--burst-seconds", type=amount, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="write the server's log here")
    given = parser.parse_args()
    cases = make_cases(given.cases)
    with ServerProcess(*OPTIONS) as server:
        try:
            caller = Caller(server.port, cases, given.seed, has_ranks=not given.burst)
            bars = asyncio.run(soak(server, caller, given))
        finally:
            if given.log is not None:
                given.log.write_text("".join(server.log))
    for bar in bars:
        print(f"{bar.name:40}{bar.value:10.3g} {bar.unit:2} at most {bar.most:<6g}"
              f"{'holds' if bar.holds else 'MISSED'}")  # fmt: skip
    is_fine = all(bar.holds for bar in bars)
    print(json.dumps({bar.name: round(bar.value, 4) for bar in bars} | {"ok": is_fine}))
    return 0 if is_fine else 1


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
