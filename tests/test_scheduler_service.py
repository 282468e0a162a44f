"""A service under load, simulated: what deadlines and priorities bring, and what they cost.

A step takes 5 ms and 0.1 ms for each row; eight requests run at once. Arrivals are random with
bursts, at 90 % of what the same requests need when all are there from the start.
"""

import random
from dataclasses import dataclass, replace

import pytest
from scheduler_cases import Service, make_request, make_scheduler, step

from outrider.engine.scheduler import Scheduler

LOAD = 0.9


@dataclass(frozen=True)
class Job:
    name: str
    arrival: float
    prompt: int
    output: int
    deadline: float
    priority: int
    owner: str = ""


@dataclass(frozen=True)
class Outcome:
    on_time: float  # share of all jobs
    seconds: float  # until the last one ended
    waits: dict[str, float]  # seconds from arrival to end


def traffic(seed: int, count: int = 400) -> list[Job]:
    """Two of three are short and wanted soon, the rest long and not urgent; none has arrived."""
    rng = random.Random(seed)
    jobs = []
    for i in range(count):
        if rng.random() < 0.67:
            prompt, output = rng.randrange(20, 120), rng.randrange(10, 40)
            jobs.append(Job(f"chat{i}", 0.0, prompt, output, 0.6, 0))
        else:
            prompt, output = rng.randrange(200, 800), rng.randrange(80, 250)
            jobs.append(Job(f"batch{i}", 0.0, prompt, output, 60.0, 1))
    return jobs


def arriving(jobs: list[Job], seconds: float, seed: int) -> list[Job]:
    """The jobs spread over a time, in bursts of up to five."""
    rng = random.Random(seed)
    moments: list[float] = []
    while len(moments) < len(jobs):
        moments += [rng.random() * seconds] * rng.randrange(1, 6)
    moments = sorted(moments[: len(jobs)])
    return [replace(job, arrival=at) for job, at in zip(jobs, moments, strict=True)]


def serve(jobs: list[Job], with_terms: bool) -> Outcome:
    clock = Service()
    scheduler = make_scheduler(pages=1024, max_requests=8, max_rows=512, clock=clock)
    left = sorted(jobs, key=lambda job: job.arrival)[::-1]
    running: dict[str, Job] = {}
    ended: dict[str, float] = {}
    while left or running:
        if left and not running:
            clock.now = max(clock.now, left[-1].arrival)
        while left and left[-1].arrival <= clock.now:
            job = left.pop()
            running[job.name] = job
            terms = {"priority": job.priority, "deadline": job.deadline} if with_terms else {}
            scheduler.add(
                make_request(
                    job.name,
                    job.prompt,
                    max_tokens=job.output,
                    arrival=job.arrival,
                    owner=job.owner,
                    **terms,
                )
            )
        schedule = step(scheduler, is_checked=False)
        clock.now += 0.005 + 0.0001 * schedule.num_rows
        for name in end_of(scheduler, running):
            ended[name] = clock.now
            del running[name]
    waits = {job.name: ended[job.name] - job.arrival for job in jobs}
    on_time = sum(waits[job.name] <= job.deadline for job in jobs) / len(jobs)
    return Outcome(on_time, clock.now, waits)


def end_of(scheduler: Scheduler, jobs: dict[str, Job]) -> list[str]:
    done = [r for r in scheduler.running if r.num_output_tokens == jobs[r.request_id].output]
    for request in done:
        scheduler.remove(request)
    return [request.request_id for request in done]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("priorities", [True, False])
def test_terms_bring_more_requests_home_on_time_at_the_same_throughput(seed, priorities):
    jobs = traffic(seed)
    busy = serve(jobs, with_terms=False).seconds
    arrived = arriving(jobs, busy / LOAD, seed)
    if not priorities:
        arrived = [replace(job, priority=0) for job in arrived]
    off, on = (serve(arrived, with_terms) for with_terms in (False, True))
    assert on.on_time >= off.on_time + 0.2, (on.on_time, off.on_time)
    assert on.seconds <= 1.05 * off.seconds


def test_a_flood_of_one_owner_hardly_slows_another():
    flood = [Job(f"flood{i}", 0.0, 300, 60, 1e6, 0, "flood") for i in range(150)]
    chats = [Job(f"chat{i}", 0.5 + i, 60, 20, 1e6, 0, "chat") for i in range(8)]
    apart = serve([*flood, *chats], with_terms=False)
    same = serve([replace(job, owner="") for job in [*flood, *chats]], with_terms=False)
    slowest = max(apart.waits[job.name] for job in chats)
    assert slowest < 1.5, slowest  # a seat gets free every 0.13 s, then 20 steps of 6 to 40 ms
    assert min(same.waits[job.name] for job in chats) > 5 * slowest
    assert apart.seconds == pytest.approx(same.seconds, rel=0.05)
