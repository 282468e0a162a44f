"""What deadlines and priorities bring on a real server: the same load with them and without.

    python bench/deadlines.py                      # 90 % load, three rounds: some minutes

Two of three calls are chats of a few tokens that are wanted soon, the rest long and not urgent. All
at once they say what the server sustains; then the same calls arrive in bursts at --load of that,
with and without `deadline` and `priority`, in turns. On time is a chat whose last token came within
its deadline, seen by the client. The last line is {"with": {"on_time": …, "seconds": …}, "without":
…}: the share of chats on time, and seconds until the last answer; medians over --rounds.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from common import DEFAULT_PROMPTS, alternate, amount, count, read_prompts
from load import CHAT, ServerProcess, call, chat_body

MOST_IN_A_BURST = 8


@dataclass(frozen=True, slots=True)
class Job:
    """One call: how long an answer it wants, and by when."""

    messages: list[dict[str, str]]
    max_tokens: int
    is_urgent: bool

    def body(self, terms: dict[str, Any]) -> Any:
        return chat_body(self.messages, self.max_tokens, temperature=0, **terms)


def make_jobs(num: int, seed: int) -> list[Job]:
    """Two of three are short and wanted soon, the rest long and not urgent."""
    pick = random.Random(seed)
    chats = [prompt.conversation for prompt in read_prompts([DEFAULT_PROMPTS])]
    jobs = []
    for _ in range(num):
        is_urgent = pick.random() < 2 / 3
        max_tokens = pick.randrange(10, 40) if is_urgent else pick.randrange(80, 250)
        jobs.append(Job(pick.choice(chats), max_tokens, is_urgent))
    return jobs


def arrivals(num: int, seconds: float, seed: int) -> list[float]:
    """Moments spread over a time, in bursts."""
    pick = random.Random(seed)
    moments: list[float] = []
    while len(moments) < num:
        moments += [pick.random() * seconds] * pick.randrange(1, MOST_IN_A_BURST + 1)
    return sorted(moments[:num])


async def serve(
    port: int, jobs: Sequence[Job], moments: Sequence[float], deadline: float, has_terms: bool
) -> dict[str, float]:
    """Make every call at its moment; who was on time, and how long it took."""
    start = perf_counter()

    async def one(job: Job, moment: float) -> tuple[Job, float]:
        await asyncio.sleep(max(0.0, start + moment - perf_counter()))
        terms: dict[str, Any] = {}
        if has_terms:
            terms = {"deadline": deadline} if job.is_urgent else {"priority": 1}
        reply = await call(port, CHAT, job.body(terms))
        assert reply.status == 200 and reply.is_whole, f"status {reply.status}"
        return job, reply.pieces[-1][0] - (start + moment)

    ended = await asyncio.gather(*map(one, jobs, moments))
    times = [seconds for job, seconds in ended if job.is_urgent]
    on_time = sum(seconds <= deadline for seconds in times) / max(1, len(times))
    return {"on_time": on_time, "seconds": perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--speculative-config", default="auto")
    parser.add_argument("--load", type=amount, default=0.9, help="share of what is sustained")
    parser.add_argument("--deadline", type=amount, default=1.0, help="seconds, of the short ones")
    parser.add_argument("--jobs", type=count, default=400)
    parser.add_argument("--seats", type=count, default=8)
    parser.add_argument("--rounds", type=count, default=3)
    given = parser.parse_args()
    jobs = make_jobs(given.jobs, 1)
    options = ("--max-num-seqs", str(given.seats), "--max-waiting", str(given.jobs))
    with ServerProcess(*options, "--speculative-config", given.speculative_config) as server:

        def run(moments: Sequence[float], has_terms: bool) -> dict[str, float]:
            return asyncio.run(serve(server.port, jobs, moments, given.deadline, has_terms))

        at_once = [0.0] * len(jobs)
        run(at_once, has_terms=False)  # warms up
        seconds = run(at_once, has_terms=False)["seconds"]
        print(f"{len(jobs)} calls at once: {seconds:.1f} s", flush=True)
        moments = arrivals(len(jobs), seconds / given.load, 1)
        sides = alternate(
            given.rounds,
            lambda: run(moments, has_terms=True),
            lambda: run(moments, has_terms=False),
        )
    found = {
        name: {key: round(median(one[key] for one in rounds), 3) for key in ("on_time", "seconds")}
        for name, rounds in zip(("with", "without"), sides, strict=True)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
