"""Random traffic: everybody is served to the end, and the books agree at every step."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import Service, make_request, make_scheduler, step

from outrider.engine.request import Status


@dataclass(frozen=True)
class Visit:
    at: int  # step in which it arrives
    beginning: int  # pages that it has in common with others
    rest: int
    output: int
    owner: str
    priority: int
    deadline: float | None
    leaves: int | None  # steps after which it is aborted


VISITS = st.lists(
    st.builds(
        Visit,
        at=st.integers(0, 20),
        beginning=st.integers(0, 3),
        rest=st.integers(1, 30),
        output=st.integers(1, 40),
        owner=st.sampled_from("abc"),
        priority=st.integers(0, 2),
        deadline=st.sampled_from([None, None, 1.0, 10.0, 1000.0]),
        leaves=st.sampled_from([None, None, None, 0, 3, 30]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    visits=VISITS,
    pages=st.integers(8, 20),
    seats=st.integers(1, 4),
    rows=st.integers(4, 40),
    bound=st.integers(1, 20),
    reuse=st.booleans(),
)
def test_everybody_is_served_whatever_comes(visits, pages, seats, rows, bound, reuse):
    clock = Service()
    scheduler = make_scheduler(
        pages,
        seats,
        rows,
        clock=clock,
        prompt_rows=lambda decoding, context: bound,
        reuse_prefixes=reuse,
    )
    coming = {f"r{i}": visit for i, visit in enumerate(visits)}
    here = {}
    served: set[str] = set()
    for now in range(3000):
        for name, visit in coming.items():
            if visit.at == now:
                here[name] = make_request(
                    name,
                    visit.rest,
                    beginning=[visit.beginning] * 16 * visit.beginning,
                    owner=visit.owner,
                    max_tokens=visit.output,
                    arrival=float(now),
                    priority=visit.priority,
                    deadline=visit.deadline,
                )
                scheduler.add(here[name])
        for name, request in list(here.items()):
            leaves = coming[name].leaves
            if leaves is not None and now == coming[name].at + leaves:
                request.output.finish("abort")
                scheduler.remove(here.pop(name))
        schedule = step(scheduler)
        clock.now += 1.0
        working = [work.request for work in schedule.works]
        assert len(set(map(id, working))) == len(working)
        assert not set(map(id, working)) & set(map(id, schedule.preempted))
        assert schedule.works or not here, "nobody moves"
        for request in working:
            name = request.request_id
            assert request.status is Status.RUNNING
            if request.num_output_tokens == coming[name].output:
                scheduler.remove(request)
                served.add(name)
                del here[name]
        check_books(scheduler, here)
        if now > 20 and not here:
            break
    else:
        raise AssertionError(f"{sorted(here)} were never served to the end")
    assert served >= {name for name, visit in coming.items() if visit.leaves is None}
    assert not scheduler.has_work and scheduler.arena.owners == []
    assert scheduler.arena.num_free_pages == pages
    assert reuse or scheduler.arena.num_known_pages == 0


def check_books(scheduler, here) -> None:
    scheduler.arena.check_integrity()
    waiting = list(scheduler.waiting)
    assert len(waiting) == len(scheduler.waiting)
    assert {id(request) for request in [*waiting, *scheduler.running]} == set(
        map(id, here.values())
    )
    assert set(scheduler.arena.owners) == {r.request_id for r in scheduler.running}
    assert all(request.status is Status.WAITING for request in waiting)
    assert len(scheduler.running) <= scheduler.max_requests
