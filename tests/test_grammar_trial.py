"""Grammars from anybody: what ends llguidance, stops others or is read wrongly is refused."""

import json
import os
import sys
import threading
import time

import numpy as np
import pytest
from fakes import FakeTarget
from serving_cases import CHAT, COMPLETIONS, USER, asked, make_llm, refusal, serving
from toy_models import toy_tokenizer

import outrider.grammar
import outrider.grammar_trial
from outrider import LLM, SamplingError, SamplingParams
from outrider.grammar import Grammars, checked_schema
from outrider.tokenizer import Tokenizer

pytest.importorskip("llguidance")

EOS = 2
TOKENIZER = Tokenizer.from_transformers(toy_tokenizer())
HUGE = 2**63 - 1
NOTHING = np.array([], np.int32)


def grammars() -> Grammars:
    return Grammars(TOKENIZER, 96, [EOS])


def chain(length: int) -> dict:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}}


DEADLY = {  # each ends the process that reads it
    "references": {"json": chain(50_000)},
    "rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(50_000))
              + '\nr50000: "a"'},
    "bound": {"grammar": f'start: %json {{"type": "integer", "minimum": {-HUGE}, '
              f'"maximum": {-HUGE}}}'},
}  # fmt: skip


@pytest.mark.parametrize("name", DEADLY)
def test_what_ends_the_process_that_reads_it_is_refused_and_the_next_one_read(name):
    known = grammars()
    for _ in range(2):
        with pytest.raises(SamplingError, match="llguidance fails on it"):
            known.follow(DEADLY[name])
    assert known.follow({"regex": "ab"}).forced(NOTHING, 4)


@pytest.mark.parametrize("name", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("value", [HUGE, -HUGE - 1, 10**30, -1e19, 2**53 + 1, 10**400])
def test_bounds_that_would_be_read_as_others_are_refused(name, value):
    for schema in (
        {"type": "integer", name: value},
        {"properties": {"const": {"anyOf": [{"type": "integer", name: value}]}}},
        json.dumps({"$defs": {"a": {"items": [{name: value}]}}}) if value != 10**400 else "",
    ):
        if schema:
            with pytest.raises(SamplingError, match=f"{name} must be a number of 64 bits"):
                grammars().follow({"json": schema})
    assert checked_schema({"enum": [{name: value}], "properties": {name: {"type": "null"}}})
    assert checked_schema({name: 2**62, "type": "integer"})


def test_thousands_of_choices_are_a_choice():
    choices = [
        f"{a}{b}{c}" for a in "abcdefghijklmnopqrst" for b in "abcdefghij" for c in "xyz" * 9
    ]
    llm = LLM(
        target=FakeTarget(96), tokenizer=TOKENIZER, eos_token_ids=EOS, kv_cache_tokens=4096,
        speculative_config=None,
    )  # fmt: skip
    params = SamplingParams(structured_outputs={"choice": choices}, temperature=1, seed=1)
    [output] = llm.generate("the", params)[0].outputs
    assert output.text in choices and output.finish_reason == "stop"


def test_what_takes_too_long_is_refused_at_once_the_next_time(monkeypatch):
    monkeypatch.setattr(outrider.grammar_trial, "SECONDS", 0.3)
    monkeypatch.setattr(outrider.grammar_trial, "START_SECONDS", 0.0)
    known, slow = grammars(), {"json": {"type": "integer", "multipleOf": 999_983}}
    with pytest.raises(SamplingError, match=r"takes more than 0\.3 s"):
        known.follow(slow)
    monkeypatch.setattr(outrider.grammar_trial.Trial, "seconds", None)  # not asked any more
    with pytest.raises(SamplingError, match=r"takes more than 0\.3 s"):
        known.follow(slow)


def test_one_who_waits_is_told_when_the_server_ends():
    trial, dictionary = outrider.grammar_trial.Trial(), grammars()._tokenizer(False)[1]
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(SamplingError, match=r"not read|did not start") as error:
            trial.seconds(
                dictionary, '{"grammars":[{"json_schema":{"type":"integer","multipleOf":999983}}]}'
            )
        told.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    while trial._asked is None:
        time.sleep(0.001)
    trial.interrupt()
    thread.join(10)
    assert told


def test_a_process_that_was_ended_from_outside_is_nobodys_fault():
    known, trial = grammars(), outrider.grammar.TRIAL
    known.follow({"regex": "a"})
    for i in range(2, 5):
        assert trial._process is not None
        trial._process.kill()
        known.follow({"regex": f"a{{{i}}}"})
        trial.interrupt()  # nobody waits
    known.follow({"regex": "b"})


def test_what_is_under_way_or_waits_when_the_server_ends_is_not_held_against_the_grammar():
    known, slow = grammars(), {"json": {"type": "integer", "multipleOf": 999_983}}
    known.follow({"regex": "a"})
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(SamplingError) as error:
            known.follow(slow)
        told.append(str(error.value))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    while outrider.grammar.TRIAL._asked is None:
        time.sleep(0.001)
    time.sleep(0.05)  # for the second one to come to the lock
    outrider.grammar.TRIAL.interrupt()
    for thread in threads:
        thread.join(10)
    assert len(told) == 2 and not known._refused
    known.follow({"regex": "c"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_reads_grammars_of_its_own():
    known = grammars()
    known.follow({"regex": "a"})
    if (child := os.fork()) == 0:
        try:
            known.follow({"regex": "aa"})
            outrider.grammar.TRIAL._end()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    known.follow({"regex": "aaa"})


def test_what_packages_print_is_no_answer(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    trial = outrider.grammar_trial.Trial()
    assert trial.seconds(grammars()._tokenizer(False)[1], '{"grammars":[]}') < 1
    trial._end()


def test_a_schema_that_holds_itself_is_refused():
    schema: dict = {"type": "object"}
    schema["properties"] = {"a": schema}
    with pytest.raises(SamplingError, match="no JSON: Circular"):
        grammars().follow({"json": schema})


def test_the_answer_to_an_interrupted_question_answers_no_other(monkeypatch):
    trial, dictionary = outrider.grammar_trial.Trial(), grammars()._tokenizer(False)[1]
    ask, process = outrider.grammar_trial._answer, outrider.grammar_trial._started
    started = []
    monkeypatch.setattr(outrider.grammar_trial, "_started", lambda: started.append(1) or process())

    def interrupted(*question):
        ask(*question)
        raise KeyboardInterrupt

    monkeypatch.setattr(outrider.grammar_trial, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial.seconds(dictionary, '{"grammars":[]}')
    monkeypatch.setattr(outrider.grammar_trial, "_answer", ask)
    assert trial.seconds(dictionary, '{"grammars":[]}') < 1
    assert len(started) == 2


@pytest.fixture
def slow_trial(monkeypatch):
    """Reading any grammar but "ab" lasts until the event is set."""
    go, seconds = threading.Event(), outrider.grammar_trial.Trial.seconds

    def wait(self, dictionary, source):
        if '"ab"' not in source:
            assert go.wait(20)
        return seconds(self, dictionary, source)

    monkeypatch.setattr(outrider.grammar_trial.Trial, "seconds", wait)
    return go


def test_a_known_grammar_does_not_wait_for_one_that_is_being_read(slow_trial):
    known = grammars()
    known.follow({"choice": ["ab"]})
    thread = threading.Thread(target=known.follow, args=({"regex": "a+"},))
    thread.start()
    known.follow({"choice": ["ab"]})
    assert thread.is_alive()
    slow_trial.set()
    thread.join()


def test_calls_without_a_grammar_do_not_wait_for_grammars(slow_trial):
    llm = make_llm(target=FakeTarget(96), tokenizer=TOKENIZER, eos_token_ids=EOS)
    with serving(llm) as client:
        body = {"prompt": "the", "max_tokens": 4}
        slow = [
            threading.Thread(
                target=client.post,
                args=(COMPLETIONS,),
                kwargs={"json": {**body, "structured_outputs": {"regex": f"a{{{i}}}b"}}},
            )
            for i in range(1, 13)  # more than there are threads
        ]
        for thread in slow:
            thread.start()
        asked(client, COMPLETIONS, **body)
        assert all(thread.is_alive() for thread in slow)
        slow_trial.set()
        for thread in slow:
            thread.join()


def test_an_output_whose_grammar_began_anew_is_drafted_nothing(monkeypatch):
    state = grammars().follow({"regex": "abcab"})
    assert state.forced(NOTHING, 4)
    assert state._begin_anew(NOTHING)
    assert state.forced(NOTHING, 4) == [] == state.lawful(NOTHING, [5], [])
    assert not state._begin_anew(NOTHING)  # at one place once


def test_options_that_llguidance_would_not_see_are_refused():
    for value in (3, [], None, "x"):
        with pytest.raises(SamplingError, match="x-guidance must be an object"):
            grammars().follow({"json": {"x-guidance": value, "type": "null"}})


FUNCTION = {"type": "function", "function": {"name": "f", "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": [FUNCTION]},
    ],
)
def test_a_grammar_and_rules_for_calls_are_not_both_obeyed_and_so_refused(changes):
    llm = make_llm(target=FakeTarget(96), tokenizer=TOKENIZER, eos_token_ids=EOS)
    with serving(llm) as client:
        body = {"messages": USER, "structured_outputs": {"grammar": 'start: "a"'}}
        assert "whole answer" in refusal(client.post(CHAT, json=body | changes))["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"const": "abc"},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "maxLength": 4}}},
    ],
)
def test_arguments_that_are_no_objects_are_refused(parameters):
    llm = make_llm(target=FakeTarget(96), tokenizer=TOKENIZER, eos_token_ids=EOS)
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with serving(llm) as client:
        body = {"messages": USER, "tools": tools, "tool_choice": "required"}
        refusal(client.post(CHAT, json=body))
