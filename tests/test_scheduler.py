"""Admission, chunked prompts and preemption, without any forward."""

import pytest
from scheduler_cases import make_request, make_scheduler, names, step

from outrider.engine.request import Status
from outrider.engine.scheduler import Schedule
from outrider.target.base import PAGE_SIZE


def rows(schedule: Schedule) -> list[tuple[str, int, bool]]:
    return [(work.request.request_id, work.num_rows, work.is_last) for work in schedule.works]


def test_prompts_share_a_forward_and_long_ones_come_in_chunks():
    scheduler = make_scheduler()
    for name, size in (("a", 20), ("b", 30)):
        scheduler.add(make_request(name, size))
    assert rows(step(scheduler)) == [("a", 20, True), ("b", 12, False)]
    assert rows(step(scheduler)) == [("a", 1, True), ("b", 18, True)]
    assert rows(step(scheduler)) == [("a", 1, True), ("b", 1, True)]


def test_decoding_goes_on_while_a_prompt_fills_the_forward():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4))
    step(scheduler)
    scheduler.add(make_request("long", 100))
    seen = [rows(step(scheduler)) for _ in range(4)]
    assert seen[:3] == [[("a", 1, True), ("long", 31, False)]] * 3
    assert seen[3] == [("a", 1, True), ("long", 7, True)]


def test_prompts_leave_rows_to_the_drafts_of_others():
    scheduler = make_scheduler(draft_rows=8)
    scheduler.add(make_request("a", 4))
    step(scheduler)
    scheduler.add(make_request("long", 100))
    assert rows(step(scheduler)) == [("a", 1, True), ("long", 23, False)]


def test_no_more_than_max_requests_run():
    scheduler = make_scheduler(max_requests=2)
    requests = [make_request(name, 2) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    assert [name for name, _, _ in rows(step(scheduler))] == ["a", "b"]
    scheduler.remove(requests[0])
    assert [name for name, _, _ in rows(step(scheduler))] == ["b", "c"]


def test_first_come_first_served_even_when_a_later_one_would_fit():
    scheduler = make_scheduler(pages=4)
    scheduler.add(make_request("a", 3 * PAGE_SIZE - 1))
    scheduler.add(make_request("big", 2 * PAGE_SIZE))
    scheduler.add(make_request("small", 1))
    for _ in range(3):
        assert {name for name, _, _ in rows(step(scheduler))} == {"a"}


def test_full_arena_preempts_the_newest_which_comes_back_first():
    scheduler = make_scheduler(pages=4, max_rows=64)
    old, new = make_request("old", PAGE_SIZE), make_request("new", PAGE_SIZE)
    later = make_request("later", 1)
    for request in (old, new, later):
        scheduler.add(request)
    assert len(step(scheduler).works) == 2
    schedule = step(scheduler)
    while not schedule.preempted:
        schedule = step(scheduler)
    assert schedule.preempted == [new]
    assert names(scheduler.waiting) == ["new", "later"]
    assert scheduler.arena.num_committed("new") == 0
    assert new.group.metrics.num_preemptions == 1
    size = len(new.tokens)
    assert size > PAGE_SIZE
    scheduler.remove(old)
    works = step(scheduler).works
    assert [(w.request.request_id, w.num_rows) for w in works[:1]] == [
        ("new", size - PAGE_SIZE),  # its first page is still known
    ]


def test_preempt_all_keeps_the_order_of_arrival():
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, 2))
    step(scheduler)
    scheduler.add(make_request("d", 2))
    assert len(scheduler.preempt_all()) == 3
    assert names(scheduler.waiting) == ["a", "b", "c", "d"]
    assert scheduler.arena.owners == []


@pytest.mark.parametrize("steps", [0, 1])
def test_removed_requests_hold_nothing(steps):
    scheduler = make_scheduler()
    request = make_request("a", 40)
    scheduler.add(request)
    for _ in range(steps):
        step(scheduler)
    scheduler.remove(request)
    assert not scheduler.has_work
    assert request.status is Status.FINISHED
    assert scheduler.arena.num_free_pages == 64
