"""The bench: what it measures and leaves out, on targets whose answers are known."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_cases import toy_llm, toy_workload
from fakes import ALPHABET, ReplaySource
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.bench.contexts import context_prompts
from outrider.bench.drive import Answer, Pass, Span, drive
from outrider.bench.forward import forward_cost
from outrider.bench.lossless import Verdict
from outrider.bench.plots import can_plot
from outrider.bench.provenance import provenance, write_whole
from outrider.bench.repetition import loop_start
from outrider.bench.report import write_report
from outrider.bench.run import measure
from outrider.bench.sections import sections
from outrider.bench.speed_only import (
    LABEL,
    SIZES,
    ForcedSource,
    RandomWeights,
    Shape,
    random_target,
)
from outrider.bench.study import Settings, bench_model, bench_speed_only
from outrider.bench.summary import add, summarise
from outrider.bench.timing import alternate, spread, turns
from outrider.bench.workload import encoded, read_workload
from outrider.cli import bench as command
from outrider.cli.comparison import twin
from outrider.cli.main import app
from outrider.drafting.source import DraftContext
from outrider.engine.times import StepTimes
from outrider.errors import ConfigError, PromptError
from outrider.results import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SourceMetrics,
    SpeculativeMetrics,
)

TINY = Shape(32, 48, 2, 4, 2, 96, max_model_len=128)


def answer(index: int, token_ids: list[int], steps: list[int], metrics: Any = None) -> Answer:
    """An answer whose k-th step came at second k + 1."""
    output = RequestOutput(
        str(index),
        None,
        [1],
        [CompletionOutput(0, "", token_ids)],
        True,
        RequestMetrics(speculative_decoding=metrics),
    )
    arrivals = [(float(place + 1), count) for place, count in enumerate(steps)]
    return Answer(index=index, submitted=0.0, arrivals=arrivals, output=output)


@pytest.mark.parametrize(
    ("token_ids", "start"),
    [
        (list(range(100)), None),
        ([*range(50), *[7, 8, 9] * 10], 53),  # ends with the first copy
        ([*range(50), *[7, 8, 9] * 10, 7], 53),  # the last copy may be cut short
        ([*range(50), *[7] * 23], None),  # fewer than MIN_TOKENS
        ([*range(50), *[7] * 24], 51),
        ([*[7, 8, 9] * 10, 1], None),  # a loop that was left again
        ([*range(20), *range(40), *range(40)], None),  # two copies
        ([*[90, 91], *list(range(40)) * 3], 42),
        ([], None),
    ],
)
def test_loops_at_the_end_are_found(token_ids: list[int], start: int | None) -> None:
    assert loop_start(token_ids) == start


def test_spread_is_the_range_of_few_and_the_quartiles_of_many() -> None:
    few, many = spread([3.0, 1.0, 2.0]), spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (few.low, few.median, few.high, few.kind) == (1.0, 2.0, 3.0, "range")
    assert (many.low, many.median, many.high, many.kind) == (2.0, 3.0, 4.0, "quartiles")
    assert few.values == (3.0, 1.0, 2.0)


def test_sides_take_turns() -> None:
    order: list[str] = []
    sides = [lambda name=name: order.append(name) or float(len(order)) for name in "ab"]
    assert alternate(3, *sides) == [[1.0, 4.0, 5.0], [2.0, 3.0, 6.0]]
    assert "".join(order) == "abbaab"
    assert [list(turns(3, number)) for number in (0, 1)] == [[0, 1, 2], [2, 1, 0]]


def test_a_span_counts_what_comes_after_the_first_token_and_loops_apart() -> None:
    token_ids = [*range(10), *[50, 51] * 13]  # the first copy ends at 12
    plain = answer(0, token_ids, [1] * len(token_ids))
    assert plain.spans() == (Span(11, 11, 11.0), Span(24, 24, 24.0))
    fast = answer(0, token_ids, [1, 5, 5, 8, 17])  # the third step ends inside the first copy
    assert fast.spans() == (Span(10, 2, 2.0), Span(25, 2, 2.0))
    assert fast.first_token_seconds == 1.0


def test_drive_keeps_the_batch_full_and_gives_the_plain_text() -> None:
    llm = toy_llm()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [(i, ALPHABET.encode(text)) for i, text in enumerate(("ab", "the cat", "x", "yz"))]
    result = drive(llm, prompts, params, 2)
    alone = {i: llm.generate({"prompt_token_ids": ids}, params) for i, ids in prompts}
    for one in result.answers:
        assert one.token_ids == alone[one.index][0].outputs[0].token_ids
        assert sum(count for _, count in one.arrivals) == 20
        assert one.arrivals[0][0] > one.submitted
    assert sorted(one.index for one in result.answers) == [0, 1, 2, 3]
    assert result.num_tokens == 80 and result.times.steps == 40 and result.mean_batch == 2.0
    assert 0 < result.times.total <= result.seconds


def test_drive_leaves_no_request_behind_when_it_is_interrupted() -> None:
    llm = toy_llm()
    step = llm.engine.step

    def interrupted() -> Any:
        step()
        raise KeyboardInterrupt

    llm.engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        drive(llm, [(0, [3, 4])], SamplingParams(max_tokens=5), 1)
    assert not llm.engine.scheduler.has_work
    llm.engine.check_integrity()


def test_every_round_starts_anew_and_warm_up_is_another_text() -> None:
    plain = toy_llm()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [(i, ALPHABET.encode(text)) for i, text in enumerate(("abc", "dd", "xyz"))]
    known = {str(a.index): a.token_ids for a in drive(plain, prompts, params, 1).answers}
    made: list[ReplaySource] = []

    def speculative(batch: int) -> LLM:
        source = ReplaySource(known)
        source.propose = lambda contexts, budgets: (  # type: ignore[method-assign]
            ReplaySource.propose(source, contexts, budgets)
            if all(context.request_id in known for context in contexts)
            else [source.make([], context) for context in contexts]
        )
        made.append(source)
        return twin(plain, source, max_num_seqs=batch)

    seen: list[int] = []
    result = measure([lambda _: twin(plain), speculative], prompts, params, 1, 2, seen.append)
    assert len(made) == 2 and all(set(source.finished) > set(known) for source in made)
    assert all(set(source.finished) - set(known) == {"-1", "-2"} for source in made)
    assert sum(seen) == 2 * 2 * 3
    for part in (part for side in result.sides for part in side):
        assert {str(a.index): a.token_ids for a in part.answers} == known
    summary = summarise(result, ["u", "v", "u"], [3, 2, 3])
    assert summary.acceptance_length is not None and summary.acceptance_length > 1.5
    assert [kind.category for kind in summary.kinds] == ["u", "v"]
    (source,) = summary.sources
    assert source.num_accepted_draft_tokens == source.num_draft_tokens > 0


def test_acceptance_length_counts_forwards_without_drafts() -> None:
    split = SourceMetrics(4, 3, [1, 1, 1, 1], [1, 1, 1, 0])
    metrics = SpeculativeMetrics(5, 1, 4, 3, 8, {3: 1}, {"lookup": split}, {"stop": 1})
    plain = Pass([answer(0, list(range(8)), [1] * 8)], 8.0, StepTimes(forward=8.0, steps=8))
    fast = Pass([answer(0, list(range(8)), [1, 1, 4, 1, 1], metrics)], 5.0, StepTimes(steps=5))
    measured = SimpleNamespace(batch=1, sides=([plain, plain], [fast, fast]))
    summary = summarise(measured, ["a"], [1])  # type: ignore[arg-type]
    assert summary.acceptance_length == 7 / 4  # the first token comes with the prompt
    assert summary.speedup.median == pytest.approx(8 / 5)
    assert summary.decode_speedup is not None
    assert summary.decode_speedup.median == pytest.approx((7 / 4) / (7 / 7))
    assert summary.plain.milliseconds_per_step["verify"] == pytest.approx(1000.0)
    assert summary.sources[0].drafted_per_position == [2, 2, 2, 2]
    assert summary.sources[0].accepted_per_position == [2, 2, 2, 0]
    assert summary.rejection_causes == {"stop": 2}
    assert summary.kinds[0].draft_acceptance_rate == 0.75


def test_answers_of_nothing_but_loops_leave_no_speed() -> None:
    looping = [5] * 30
    part = Pass([answer(0, looping, [1] * 30)], 30.0, StepTimes(steps=30))
    measured = SimpleNamespace(batch=1, sides=([part], [part]))
    summary = summarise(measured, ["a"], [1])  # type: ignore[arg-type]
    assert summary.decode_speedup is None and summary.acceptance_length is None
    assert summary.loops.num_looping == 1 and summary.loops.token_share == 1.0
    assert summary.loops.speedup == 1.0


def test_metrics_of_requests_add_up() -> None:
    one = SpeculativeMetrics(
        2, 1, 3, 1, 4, {1: 1}, {"a": SourceMetrics(3, 1, [1, 1, 1], [1, 0, 0])}
    )
    two = SpeculativeMetrics(1, 1, 1, 1, 2, {1: 1}, {"a": SourceMetrics(1, 1, [1], [1])})
    total = SpeculativeMetrics()
    add(total, one)
    add(total, two)
    assert (total.num_target_steps, total.num_output_tokens) == (3, 6)
    assert total.acceptance_histogram == {1: 2}
    assert total.per_source["a"] == SourceMetrics(4, 2, [2, 1, 1], [2, 0, 0])


def test_the_verdict_names_the_first_difference() -> None:
    llm = toy_llm()
    verdict = Verdict()
    first, same = (Pass([answer(0, [1, 2, 3], [3])], 1.0, StepTimes()) for _ in range(2))
    other = Pass([answer(0, [1, 2, 4], [3])], 1.0, StepTimes())
    verdict.compare(llm, "plain", 1, [first, same])
    assert verdict.is_lossless and verdict.num_answers == 1  # the first one is the reference
    verdict.compare(llm, "speculative", 8, [other])
    assert not verdict.is_lossless
    (difference,) = verdict.differences
    assert difference["position"] == 2 and difference["batch"] == 8
    assert (difference["plain_token"], difference["other_token"]) == ("c", "d")


def test_the_workload_that_ships_has_five_kinds_and_nothing_twice() -> None:
    workload = read_workload()
    counts = workload.as_json()["categories"]
    assert counts == {"code": 4, "code edit": 3, "json": 3, "summary": 2, "chat": 4}
    assert len({prompt.text for prompt in workload.prompts}) == 16 and not workload.notes


def test_workload_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "one"},
        {"turns": ["two", "more"], "category": "b"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
        {"prompt": "one"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    workload = read_workload([path])
    assert [(p.category, p.text) for p in workload.prompts] == [
        ("mine", "one"),
        ("b", "two"),
        ("mine", "three"),
    ]
    assert workload.prompts[2].messages[0]["role"] == "system"
    assert any("1 repeated" in note for note in workload.notes)
    assert any("first turn of 1" in note for note in workload.notes)
    assert [p.text for p in read_workload([path], ["b"]).prompts] == ["two"]
    assert [p.text for p in read_workload([path], limit=2).prompts] == ["one", "two"]
    with pytest.raises(PromptError, match=r"one of b, mine, got 'c'"):
        read_workload([path], ["c"])


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n{"prompt": 3}\n')
    with pytest.raises(PromptError, match=r"bad\.jsonl:2: 'prompt' must be text, got 3"):
        read_workload([path])


def test_prompts_of_a_fixed_length_keep_their_end() -> None:
    llm = toy_llm()
    workload = toy_workload("abcdefghij", "xy")
    whole = encoded(llm, workload, 10)
    cut = encoded(llm, workload, 10, 9)
    assert [index for index, _ in whole] == [0, 1] and [index for index, _ in cut] == [0, 1]
    assert [ids for _, ids in cut] == [ids[-9:] for _, ids in whole]
    assert encoded(llm, workload, 10, 15) == [(0, whole[0][1][-15:])]
    assert workload.notes == ["only 1 of 2 prompts are of 15 tokens or more"]
    with pytest.raises(PromptError, match="no prompt is left"):
        encoded(llm, workload, 10, 100)
    with pytest.raises(
        PromptError, match="--input-tokens 500 and --max-tokens 20 together must leave"
    ):
        encoded(llm, workload, 20, 500)


def test_context_prompts_differ_in_what_is_before_the_task_only() -> None:
    tokenizer = SimpleNamespace(
        chat_template=None,
        encode=lambda text, add_special_tokens=True: list(text.encode()),
        decode=lambda ids: bytes(ids).decode("utf-8", "replace"),
    )
    llm: Any = SimpleNamespace(tokenizer=tokenizer)
    categories, prompts = context_prompts(llm, 3000)
    texts = [tokenizer.decode(ids) for _, ids in prompts]
    assert categories == ["copy", "summary", "copy", "summary"]
    assert all(2990 <= len(ids) <= 3000 for _, ids in prompts)
    assert len({text[:500] for text in texts}) == 4, "every prompt has another part of the text"
    assert texts[0].endswith("second of November.") and "word for word" in texts[0]
    with pytest.raises(PromptError, match="--context-lengths must be at least"):
        context_prompts(llm, 20)


@pytest.mark.slow
def test_random_weights_have_the_shape_of_the_model() -> None:
    from transformers import AutoModelForCausalLM

    weights = RandomWeights(TINY, torch.float32, 0)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(TINY.config(), dtype=torch.float32)
    expected = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert {name: tuple(weights[name].shape) for name in weights} == expected
    assert TINY.num_parameters == sum(p.numel() for p in module.parameters())
    assert 1.2e9 < SIZES["1b"].num_parameters < 1.3e9


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_forced_acceptance_comes_out_as_asked(rate: float) -> None:
    plain = toy_llm()
    settings = Settings(batches=(2,), rounds=1, max_tokens=100, input_tokens=4, ignore_eos=True)
    study = bench_speed_only(plain, settings, [rate], 1)
    (one,) = study.measurements
    (source,) = one.sources or [None]
    assert study.verdict.is_lossless and study.label == LABEL
    if rate == 0.0:  # drafts that are known to be wrong are not worth a row
        assert source is None or source.num_accepted_draft_tokens == 0
    else:
        assert source is not None
        share = source.num_accepted_draft_tokens / source.num_draft_tokens
        assert share == pytest.approx(rate, abs=0.12)


def test_a_forced_draft_is_the_known_answer_with_mistakes() -> None:
    source = ForcedSource({3: list(range(10, 30))}, 0.5, 8, seed=1)
    context = DraftContext("3", np.arange(7, dtype=np.int32), 5, SamplingParams())
    (draft,) = source.propose([context], [8])
    right = [token == 12 + i for i, token in enumerate(draft.token_ids)]
    assert len(draft) == 8 and 0 < sum(right) < 8 and draft.confidence == [0.5] * 8
    assert source.propose([replace(context, request_id="-1")], [8])[0].token_ids == []
    with pytest.raises(ConfigError, match="forced acceptance must be in"):
        ForcedSource({}, 1.5, 8, 0)


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of 135m, 360m, 1b, 3b, 8b, got '2b'"):
        random_target("2b", "auto", 0)


def test_forward_cost_has_one_value_per_row_count() -> None:
    cost = forward_cost(toy_llm(), (1, 2, 4))
    assert cost.rows == [1, 2, 4] and min(cost.ratios[:2]) == 1.0
    assert all(0 < one.low <= one.median <= one.high for one in cost.seconds)


def whole_study(**changes: Any) -> Any:
    settings = Settings(batches=(1, 2), rounds=1, max_tokens=10, **changes)
    study = bench_model(
        toy_llm(), {"auto": "auto"}, toy_workload("the the the the", "abc", "the"), settings
    )
    study.provenance = provenance(2)
    return study


def test_a_study_is_json_with_provenance() -> None:
    found = json.loads(json.dumps(whole_study().as_json()))
    assert found["format"] == 2 and found["lossless"]["is_lossless"] is True
    assert found["lossless"]["num_answers"] == 3 * (2 * 2 - 1)
    assert [one["batch"] for one in found["measurements"]] == [1, 2]
    assert found["measurements"][0]["plain"]["tokens_per_second"]["values"]
    assert found["settings"]["max_tokens"] == 10 and found["target"]["name"] == "fake"
    assert {"command", "date", "commit", "cpu", "versions"} <= set(found["provenance"])


@pytest.mark.slow
@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_reports_stand_alone_and_say_what_was_measured(tmp_path: Path) -> None:
    study = whole_study()
    write_report(study, tmp_path / "one.html")
    page = (tmp_path / "one.html").read_text()
    assert page.count("<svg") == 5 and "http-equiv" not in page
    assert not re.search(r'(src|href)="(?!#)', page), "nothing is loaded from elsewhere"
    for section in sections(study):
        assert section.title in page
    write_report(study, tmp_path / "two.md")
    text = (tmp_path / "two.md").read_text()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert len(pictures) == 5 and all((tmp_path / name).exists() for name in pictures)
    assert "| batch 2 |" in text


def test_speed_only_is_said_above_everything(tmp_path: Path) -> None:
    study = bench_speed_only(
        toy_llm(), Settings(batches=(1,), rounds=1, max_tokens=8, input_tokens=4), [0.8], 4
    )
    study.provenance = provenance(2)
    write_report(study, tmp_path / "s.md")
    text = (tmp_path / "s.md").read_text()
    headings = re.findall(r"^## .*$", text, re.MULTILINE)
    assert headings and all(LABEL in heading for heading in headings)
    assert json.dumps(study.as_json()["label"]) == json.dumps(LABEL)
    assert "By kind of prompt" not in text


@pytest.mark.slow
def test_without_matplotlib_a_report_has_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.bench.report.can_plot", lambda: False)
    study = whole_study()
    study.provenance["load_average"] = [3.0, 1.0, 1.0]
    write_report(study, tmp_path / "one.html")
    page = (tmp_path / "one.html").read_text()
    assert "<svg" not in page and "How much faster" in page
    assert "the machine was busy at the start (load average 3.0)" in page


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "a.json", "{}")
    assert (tmp_path / "new" / "a.json").read_text() == "{}"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write"):
        write_whole(tmp_path / "file" / "a.json", "{}")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


@pytest.mark.slow
def test_the_command_writes_json_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = tmp_path / "w.jsonl"
    workload.write_text('{"prompt": "the the the", "category": "x"}\n{"prompt": "abc"}\n')
    monkeypatch.setattr(command.ModelOptions, "load", lambda options: toy_llm())
    monkeypatch.setattr(command, "_pin", lambda model: None)
    arguments = ["bench", "-w", str(workload), "--batch", "1,2", "--rounds", "1"]
    arguments += ["--max-tokens", "6", "--report", "markdown", "-o", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["workload"]["categories"] == {"x": 1, "w": 1}
    assert (tmp_path / "out.md").exists()
    assert "6 of 6 answers are the plain text" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "1,x"], "--batch must be numbers"),
        (["--batch", "0"], "--batch must be positive"),
        (["--batch", ""], "--batch needs at least one"),
        (["--report", "pdf"], "--report must be one of html, markdown, none"),
        (["--temperature", "-1"], "temperature must be a finite number of at least 0, got -1"),
        (["--speculative-config", "none"], "bench needs drafts"),
        (["--workload", "/nowhere.jsonl"], "cannot read /nowhere.jsonl"),
        (["--speed-only", "9b"], "--speed-only must be one of"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(options: Any) -> LLM:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(command.ModelOptions, "load", loaded)
    monkeypatch.setattr(command, "_pin", lambda model: None)
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert message in str(result.exception)
