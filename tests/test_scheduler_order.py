"""Who is served first: priorities, due dates, fair shares. No forward, and a clock that is told."""

import pytest
from scheduler_cases import Service, make_request, make_scheduler, names, step

from outrider.engine.queue import PATIENCE, QUANTUM
from outrider.engine.request import Status
from outrider.target.base import PAGE_SIZE


def admitted(scheduler, now: float = 0.0) -> list[str]:
    """Ids in the order in which they get the one seat of this scheduler."""
    order = []
    while scheduler.has_work:
        schedule = step(scheduler)
        request = scheduler.running[0]
        assert [request] == [work.request for work in schedule.works]
        order.append(request.request_id)
        scheduler.remove(request)
    return order


def test_lower_numbers_go_first_then_who_came_first():
    scheduler = make_scheduler(max_requests=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        scheduler.add(make_request(name, 4, priority=priority))
    assert names(scheduler.waiting) == ["c", "e", "a", "d", "b"]
    assert admitted(scheduler) == ["c", "e", "a", "d", "b"]


def test_within_a_priority_who_is_due_first_goes_first_and_those_without_a_deadline_last():
    scheduler = make_scheduler(max_requests=1)
    for name, deadline in (("never", None), ("late", 9.0), ("soon", 3.0), ("never too", None)):
        scheduler.add(make_request(name, 4, deadline=deadline))
    scheduler.add(make_request("first", 4, priority=-1))
    assert admitted(scheduler) == ["first", "soon", "late", "never", "never too"]


def test_who_can_no_longer_be_on_time_lets_others_pass_and_is_served_all_the_same():
    clock = Service()
    scheduler = make_scheduler(max_requests=1, clock=clock)
    for name, deadline in (("hopeless", 2.0), ("soon", 5.0), ("later", 6.0)):
        scheduler.add(make_request(name, 4, deadline=deadline))
    clock.now = 3.0
    assert admitted(scheduler) == ["soon", "later", "hopeless"]


def test_what_a_request_still_needs_counts_against_its_deadline():
    clock = Service()
    scheduler = make_scheduler(max_requests=1, clock=clock)
    for _ in range(3):  # 10 tokens each, one second a token
        request = make_request("x", 4)
        scheduler.add(request)
        for _ in range(10):
            step(scheduler)
            clock.now += 1.0
        scheduler.remove(request)
    assert scheduler.pace.token_seconds == pytest.approx(1.0, rel=0.2)
    assert scheduler.pace.output_tokens == pytest.approx(10.0)
    now = clock.now
    for name, deadline in (("hopeless", 5.0), ("possible", 14.0)):
        scheduler.add(make_request(name, 4, deadline=deadline, arrival=now))
    assert admitted(scheduler) == ["possible", "hopeless"]
    short = make_request("short", 4, deadline=5.0, arrival=now, max_tokens=3)
    for request in (make_request("hopeless", 4, deadline=4.0, arrival=now), short):
        scheduler.add(request)
    assert admitted(scheduler) == ["short", "hopeless"]


def test_nobody_is_overtaken_for_ever():
    clock = Service()
    scheduler = make_scheduler(max_requests=1, clock=clock)
    scheduler.add(make_request("patient", 4))
    clock.now = PATIENCE - 4.0
    scheduler.add(make_request("soon", 4, deadline=3.0, arrival=clock.now))
    scheduler.add(make_request("later", 4, deadline=9.0, arrival=clock.now))
    assert admitted(scheduler) == ["soon", "patient", "later"]


def test_a_thousand_requests_of_one_owner_do_not_keep_anothers_waiting():
    scheduler = make_scheduler(max_requests=1)
    for i in range(1000):
        scheduler.add(make_request(f"a{i}", 8, owner="a"))
    order = []
    for _ in range(6):
        step(scheduler)
        order.append(scheduler.running[0].request_id)
        scheduler.remove(scheduler.running[0])
        if len(order) == 3:
            scheduler.add(make_request("b", 8, owner="b"))
            scheduler.add(make_request("b too", 8, owner="b"))
    assert order == ["a0", "a1", "a2", "a3", "b", "a4"]
    assert len(scheduler.waiting) == 1002 - 6


def test_owners_get_equal_rows_whatever_their_requests_are_like():
    """a: many small requests, b: few large ones; c comes in the middle and is owed nothing."""
    scheduler = make_scheduler(max_requests=1, max_rows=64)
    for i in range(400):
        scheduler.add(make_request(f"a{i}", 6, owner="a"))
    for i in range(60):
        scheduler.add(make_request(f"b{i}", 60, owner="b"))
    rows = {"a": 0, "b": 0, "c": 0}
    before = dict(rows)
    for count in range(240):
        schedule = step(scheduler)
        request = scheduler.running[0]
        rows[request.owner] += schedule.num_rows
        scheduler.remove(request)
        if count == 119:
            assert abs(rows["a"] - rows["b"]) <= 60
            before = dict(rows)
            for i in range(100):
                scheduler.add(make_request(f"c{i}", 20, owner="c"))
    gained = {owner: rows[owner] - before[owner] for owner in rows}
    assert max(gained.values()) - min(gained.values()) <= 60, gained


def test_due_dates_may_put_an_owner_ahead_but_not_by_much():
    scheduler = make_scheduler(max_requests=1, max_rows=256, pages=256)
    size = 200
    for i in range(40):
        scheduler.add(make_request(f"a{i}", size, owner="a", deadline=100.0 + i))
    scheduler.add(make_request("b", size, owner="b"))
    order = admitted(scheduler)
    place = order.index("b")
    assert order[:place] == [f"a{i}" for i in range(place)]
    assert QUANTUM / size < place <= QUANTUM / size + 2


def test_priority_takes_a_seat_from_the_last_of_the_lowest():
    scheduler = make_scheduler(max_requests=3)
    for name, priority in (("low", 2), ("lower", 3), ("lower too", 3)):
        scheduler.add(make_request(name, 4, priority=priority))
    step(scheduler)
    scheduler.add(make_request("same", 4, priority=3))
    assert step(scheduler).preempted == []
    scheduler.add(make_request("high", 4, priority=0))
    schedule = step(scheduler)
    assert names(schedule.preempted) == ["lower too"]
    assert names(scheduler.running) == ["low", "lower", "high"]
    assert names(scheduler.waiting) == ["lower too", "same"]
    assert schedule.preempted[0].status is Status.WAITING
    assert schedule.preempted[0].group.metrics.num_preemptions == 1


def test_priority_takes_pages_too_but_not_in_vain():
    scheduler = make_scheduler(pages=8, max_requests=4, max_rows=256)
    scheduler.add(make_request("high", 4 * PAGE_SIZE - 8, priority=0))
    scheduler.add(make_request("low", 2 * PAGE_SIZE - 8, priority=1))
    step(scheduler)
    scheduler.add(make_request("too large", 6 * PAGE_SIZE, priority=0))
    assert step(scheduler).preempted == []  # not even without "low" would it fit
    scheduler.remove(next(iter(scheduler.waiting)))
    scheduler.add(make_request("fits", 3 * PAGE_SIZE - 1, priority=0))
    schedule = step(scheduler)
    assert names(schedule.preempted) == ["low"]
    assert "fits" in names(work.request for work in schedule.works)


def test_full_arena_takes_from_the_lowest_priority_whoever_asks():
    scheduler = make_scheduler(pages=6, max_rows=256)
    scheduler.add(make_request("low", 2 * PAGE_SIZE - 1, priority=1))
    step(scheduler)
    scheduler.add(make_request("high", 2 * PAGE_SIZE - 1, priority=0))
    preempted = []
    for _ in range(40):
        preempted += step(scheduler).preempted
    assert names(preempted) == ["low"]


def test_an_urgent_prompt_goes_before_a_long_one_that_is_under_way():
    scheduler = make_scheduler(max_rows=32)
    scheduler.add(make_request("long", 200))
    step(scheduler)
    scheduler.add(make_request("urgent", 20, deadline=1.0))
    assert [(work.request.request_id, work.num_rows) for work in step(scheduler).works] == [
        ("urgent", 20),
        ("long", 12),
    ]


def test_prompts_beside_decoding_requests_are_bounded():
    scheduler = make_scheduler(
        max_rows=64, prompt_rows=lambda decoding, context: 5 + decoding + (context > 60)
    )
    scheduler.add(make_request("a", 50))
    assert [work.num_rows for work in step(scheduler).works] == [50]  # nobody waits for it
    scheduler.add(make_request("long", 15))
    assert [work.num_rows for work in step(scheduler).works] == [1, 6]
    scheduler.add(make_request("other", 30))
    assert [work.num_rows for work in step(scheduler).works] == [1, 6]
    assert [work.num_rows for work in step(scheduler).works] == [1, 3, 3]
    assert [work.num_rows for work in step(scheduler).works] == [1, 1, 8]  # contexts of 53 and 15


def test_removing_from_the_middle_of_the_queue():
    scheduler = make_scheduler(max_requests=1)
    requests = [make_request(f"r{i}", 4, priority=i % 2, owner="ab"[i % 3 == 0]) for i in range(9)]
    for request in requests:
        scheduler.add(request)
    for i in (4, 0, 7, 3):
        scheduler.remove(requests[i])
        scheduler.remove(requests[i])  # once more does nothing
    assert names(scheduler.waiting) == ["r2", "r6", "r8", "r1", "r5"]
    assert sorted(admitted(scheduler)) == ["r1", "r2", "r5", "r6", "r8"]
    assert not scheduler.has_work


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_idle_time_is_no_step_time(tokens):
    clock = Service()
    scheduler = make_scheduler(max_requests=1, clock=clock)
    for index in range(5):
        request = make_request(str(index), 10, arrival=clock.now)
        scheduler.add(request)
        for _ in range(tokens):
            step(scheduler)
            clock.now += 0.01
        scheduler.remove(request)
        clock.now += 3600.0
    assert scheduler.pace.row_seconds <= 0.0011
    assert scheduler.pace.token_seconds <= 0.011
    late = make_request("late", 10, arrival=clock.now, deadline=30.0)
    assert not scheduler.pace.is_late(late, clock.now)
