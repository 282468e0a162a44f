"""What a report says, as sections of words and tables, before it becomes HTML or Markdown."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.configs import PLAIN
from outrider.bench.intervals import LEVEL
from outrider.bench.study import Study
from outrider.bench.summary import Kind, Measurement, Side
from outrider.bench.timing import Spread

NOTHING = "–"
FEW_DRAFTS = 20  # a share of fewer says little, and is shown as such
BUSY_LOAD = 0.5  # processes waiting for a core before we began, over the last minute


@dataclass(slots=True)
class Table:
    """Rows of text; the first column is left aligned, the others right."""

    header: list[str]
    rows: list[list[str]]


@dataclass(slots=True)
class Section:
    """One heading with what it says. `figure` names the plot that belongs to it."""

    title: str
    words: str
    table: Table | None = None
    figure: str = ""
    details: list[str] = field(default_factory=list)  # listed below the table


def sections(study: Study) -> list[Section]:
    """Everything worth telling, the most important first."""
    parts = [_speed(study)]
    if not study.label:
        parts += [_kinds(study), _same_text(study), _loops(study)]
    parts.append(_acceptance(study))
    if study.contexts:
        parts.append(_contexts(study))
    parts += [_phases(study), _forward(study), _method(study)]
    return parts


def headline(study: Study) -> str:
    """The result in one sentence."""
    by_config: dict[str, list[str]] = {}
    for one in study.measurements:
        gain = f"{times(one.speedup)} at {case_name(one)}"
        by_config.setdefault(one.config, []).append(gain)
    gains = "; ".join(
        f"{name} {', '.join(found)}" if study.has_several else ", ".join(found)
        for name, found in by_config.items()
    )
    same = f"{study.verdict.num_same} of {study.verdict.num_answers} answers are the plain text"
    result = f"Tokens per second of speculative over plain decoding: {gains}. {same}."
    return f"{study.incomplete} {result}" if study.incomplete else result


def times(value: Spread | None) -> str:
    """A ratio: ``1.84×``."""
    return NOTHING if value is None else f"{value.median:.2f}×"


def with_spread(
    value: Spread | None, form: str = "{:.0f}", factor: float = 1.0, unit: str = ""
) -> str:
    """Median and range: ``61 (58–63)``."""
    if value is None:
        return NOTHING
    low, high = form.format(factor * value.low), form.format(factor * value.high)
    middle = form.format(factor * value.median)
    return middle + unit if low == high else f"{middle}{unit} ({low}–{high})"


def ratio(value: Spread | None) -> str:
    """A ratio with its range: ``1.84× (1.80–1.91)``."""
    return with_spread(value, "{:.2f}", unit="×")


def acceptance(one: Kind | Measurement) -> str:
    """Tokens per forward and what they could be with other prompts: ``1.84 (1.71–1.96)``."""
    middle = number(one.acceptance_length)
    ends = [number(end) for end in one.acceptance_interval or ()]
    return middle if len(set(ends)) < 2 else f"{middle} ({'–'.join(ends)})"


def number(value: float | None, form: str = "{:.2f}") -> str:
    return NOTHING if value is None else form.format(value)


def counted(count: int, thing: str) -> str:
    """``1 round``, ``3 rounds``."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def busy(provenance: dict[str, Any]) -> list[str]:
    """A warning where others used the machine when the measuring began."""
    load = (provenance.get("load_average") or [0.0])[0]
    if load < BUSY_LOAD:
        return []
    return [
        f"the machine was busy at the start (load average {load:.1f}): trust ratios more than "
        "speeds, and measure again"
    ]


def case_name(one: Measurement) -> str:
    """What sets this measurement apart: ``batch 8``, ``batch 1, acceptance 0.8``."""
    name = f"batch {one.batch}"
    if one.forced_acceptance is not None:
        name += f", acceptance {one.forced_acceptance:g}"
    return name


def row_name(study: Study, one: Measurement, name: str | None = None) -> str:
    """The name of a row, and of the config where there are several: ``batch 8, mine``."""
    name = case_name(one) if name is None else name
    return f"{name}, {one.config}" if study.has_several else name


def _speed(study: Study) -> Section:
    rows = [
        [
            row_name(study, one),
            with_spread(one.plain.tokens_per_second),
            with_spread(one.speculative.tokens_per_second),
            ratio(one.speedup),
            ratio(one.decode_speedup),
            acceptance(one),
            " / ".join(f"{1e3 * side.first_token_seconds.median:.0f}" for side in one.sides),
        ]
        for one in study.measurements
    ]
    header = [
        "",
        "plain tokens/s",
        "speculative tokens/s",
        "throughput",
        "decoding",
        "tokens per forward",
        "first token, ms",
    ]
    words = (
        "Throughput counts all output tokens over the wall time, prompts included. Decoding is the "
        "speed of one request after its first token, without text that loops. Tokens per forward "
        "says how many tokens one forward of the target gave a request (plain decoding gives one), "
        f"with {LEVEL:.0%} intervals of drawing the prompts again in parentheses. "
        "The first token's time is given for plain and speculative decoding. "
        f"{_medians(study)}"
    )
    details = busy(study.provenance)
    details += [
        f"{row_name(study, one)}: on average {one.speculative.mean_batch:.1f} requests were "
        "decoded at the same time, fewer than the batch size while the last answers run out"
        for one in study.measurements
        if one.speculative.mean_batch < 0.8 * one.batch
    ]
    return Section("How much faster", words, Table(header, rows), "speedups", details)


def _medians(study: Study) -> str:
    """What the figures and the parentheses behind them are."""
    rounds = [len(one.speedup.values) for one in study.measurements]
    if max(rounds) == 1:
        return "Figures of one round."
    many = f"{min(rounds)} to {max(rounds)}" if min(rounds) < max(rounds) else f"{rounds[0]}"
    kinds = {one.speedup.kind for one in study.measurements}
    ends = "the quartiles" if kinds == {"quartiles"} else "the lowest and highest"
    return f"Medians over {many} rounds with {ends} in parentheses."


def _kinds(study: Study) -> Section:
    case = study.cases(study.measurements)[0]
    rows = [
        [
            row_name(study, one, kind.category),
            str(kind.num_prompts),
            with_spread(kind.plain),
            with_spread(kind.speculative),
            ratio(kind.speedup),
            acceptance(kind),
            number(kind.draft_acceptance_rate, "{:.0%}"),
        ]
        for one, kind in kinds_of(case)
    ]
    header = [
        "kind of prompt",
        "prompts",
        "plain tokens/s",
        "speculative tokens/s",
        "speed-up",
        "tokens per forward",
        "drafts kept",
    ]
    words = (
        f"One request's decoding at {case_name(case[0])}. Text that repeats its prompt (edits, "
        "JSON, copies) is easy to draft, open text is hard: an average over kinds says little "
        "about your own mix."
    )
    return Section("By kind of prompt", words, Table(header, rows), "kinds")


def kinds_of(case: list[Measurement]) -> list[tuple[Measurement, Kind]]:
    """Every kind of prompt with each config, configs next to each other."""
    by_kind = zip(*(one.kinds for one in case), strict=True)
    return [pair for kinds in by_kind for pair in zip(case, kinds, strict=True)]


def _same_text(study: Study) -> Section:
    verdict = study.verdict
    if verdict.is_lossless:
        words = (
            f"All {verdict.num_answers} answers, plain and speculative, of every round and batch "
            "size, are token for token the first plain answer to their prompt."
        )
        return Section("Same text", words, details=_tallies(study))
    words = f"{verdict.num_same} of {verdict.num_answers} answers are the plain text."
    if not study.target["deterministic"]:
        words += (
            " This target does not run deterministically: rounding depends on what shares a "
            "forward, and near-ties flip."
        )
    details = [
        f"prompt {one['prompt']}, {one['side']}, batch {one['batch']}, token {one['position']}: "
        f"after “…{one['context']}” the plain text has {one['plain_token']!r}, "
        f"this one {one['other_token']!r}"
        for one in verdict.differences
    ]
    return Section("Not the same text", words, details=[*_tallies(study), *details])


def _tallies(study: Study) -> list[str]:
    """Of each side, where there are several configs."""
    if not study.has_several:
        return []
    return [
        f"{name}: {tally.num_same} of {tally.num_answers} answers"
        for name, tally in study.verdict.sides.items()
    ]


def _loops(study: Study) -> Section:
    rows = [
        [
            row_name(study, one),
            f"{one.loops.num_looping} of {one.loops.num_answers}",
            f"{one.loops.token_share:.0%}",
            number(one.loops.acceptance_length),
            number(one.loops.speedup, "{:.2f}×"),
        ]
        for one in study.measurements
    ]
    header = ["", "answers", "share of tokens", "tokens per forward", "speed-up"]
    words = (
        "Answers that end by repeating themselves. A loop is trivial to draft and of no use, so it "
        "is left out of every figure on this page except throughput; this is what the loops gave."
    )
    return Section("Text that loops, apart", words, Table(header, rows))


def _acceptance(study: Study) -> Section:
    rows = []
    for one in study.measurements:
        for source in one.sources:
            kept = source.num_accepted_draft_tokens / max(1, source.num_draft_tokens)
            shares = [_share(good, all_) for good, all_ in source.places]
            shares = (shares + [""] * 8)[:8]
            label = f"{source.name}, {row_name(study, one)}"
            rows.append([label, str(source.num_draft_tokens), f"{kept:.0%}", *shares])
    header = ["source", "submitted", "kept", *(f"#{i}" for i in range(1, 9))]
    words = (
        "Draft tokens submitted to the target by each source, and the share kept at each place of "
        "a draft. Later places are reached only when all before them were right, and the planner "
        "submits only tokens that are likely to pay. In parentheses: shares of fewer than "
        f"{FEW_DRAFTS} drafts, which say little."
    )
    causes: dict[str, int] = {}
    for one in study.measurements:
        for cause, count in one.rejection_causes.items():
            causes[cause] = causes.get(cause, 0) + count
    listed = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in causes.items())
    details = [f"draft tokens that were not used: {listed}"] if listed else []
    return Section("What was drafted", words, Table(header, rows), "positions", details)


def _share(kept: int, drafted: int) -> str:
    if not drafted:
        return NOTHING
    text = f"{kept / drafted:.0%}"
    return f"({text})" if drafted < FEW_DRAFTS else text


def _contexts(study: Study) -> Section:
    rows = [
        [
            row_name(study, one, f"{one.context_tokens}"),
            with_spread(one.plain.decode_tokens_per_second),
            with_spread(one.speculative.decode_tokens_per_second),
            ratio(one.decode_speedup),
            number(one.acceptance_length),
            with_spread(one.speculative.first_token_seconds, "{:.2f}"),
        ]
        for one in study.contexts
    ]
    header = [
        "prompt tokens",
        "plain tokens/s",
        "speculative tokens/s",
        "speed-up",
        "tokens per forward",
        "first token, s",
    ]
    words = (
        "The same copy and summary tasks behind more and more text to read; decoding speed of one "
        "request."
    )
    return Section("By length of the context", words, Table(header, rows), "contexts")


def _phases(study: Study) -> Section:
    rows = []
    for name, side in phases_of(study):
        phases = side.milliseconds_per_step
        cells = [f"{value:.2f}" for value in phases.values()]
        rows.append([name, *cells, f"{sum(phases.values()):.2f}", f"{side.draft_share:.1%}"])
    phases = study.measurements[0].plain.milliseconds_per_step
    header = ["ms per step", *phases, "total", "share of draft"]
    words = (
        "Draft: planning and the calls into sources. Verify: the forward of the target and the "
        "choice of tokens. Other: scheduling, packing, text. Steps that read prompts are included."
    )
    return Section("Where the time of a step goes", words, Table(header, rows), "phases")


def phases_of(study: Study) -> list[tuple[str, Side]]:
    """Every side with its name: plain decoding once, then each config."""
    sides: list[tuple[str, Side]] = []
    for case in study.cases(study.measurements):
        sides.append((f"{case_name(case[0])}, {PLAIN}", case[0].plain))
        sides += [(f"{case_name(one)}, {study.side(one.config)}", one.speculative) for one in case]
    return sides


def _forward(study: Study) -> Section:
    cost = study.forward
    assert cost is not None
    rows = [
        [f"{count} rows" if count > 1 else "1 row", with_spread(one, "{:.2f}", 1e3), f"{ratio:.2f}"]
        for count, one, ratio in zip(cost.rows, cost.seconds, cost.ratios, strict=True)
    ]
    words = (
        f"One forward of the target by its new rows, at {cost.context_tokens} tokens of context. "
        "Eight drafts cost what nine rows cost more than one: the flatter, the more a draft may "
        "be wrong."
    )
    table = Table(["", "ms", "of the cheapest of 1 and 2"], rows)
    return Section("What verifying costs", words, table, "forward")


def _method(study: Study) -> Section:
    about, settings = study.provenance, study.settings
    versions = ", ".join(f"{name} {value}" for name, value in about.get("versions", {}).items())
    inputs = study.measurements[0].input_tokens
    sampling = "greedy"
    if settings.temperature:
        sampling = f"temperature {settings.temperature:g}, top-p {settings.top_p:g}"
    sides = "plain decoding and every config" if study.has_several else "plain and speculative"
    target = study.target
    facts: dict[str, Any] = {
        "model": f"{target['name']}, {target['dtype']} on {target['device']}, "
        f"{'deterministic' if target['deterministic'] else 'not deterministic'}",
        **{
            f"drafts of {name}" if study.has_several else "drafts": json.dumps(config)
            for name, config in study.configs.items()
        },
        "prompts": f"{study.workload['num_prompts']} ({_listed(study.workload['categories'])}), "
        f"{inputs[0]} to {inputs[1]} tokens",
        "answers": f"at most {settings.max_tokens} tokens"
        + (", going on after the end of text" if settings.ignore_eos else "")
        + f"; {sampling}, seed {settings.seed}",
        "rounds": f"{settings.rounds}: {sides} take turns, and start every "
        "round anew: no source has met a prompt before, warm-up prompts are others",
        "machine": f"{about.get('cpu')}, {about.get('threads')} threads, load "
        f"{(about.get('load_average') or [float('nan')])[0]:.1f} at the start",
        "versions": f"{versions}, Python {about.get('python')}, commit {about.get('commit')}",
        "date": about.get("date"),
        "command": about.get("command"),
    }
    rows = [[name, str(value)] for name, value in facts.items()]
    return Section("How it was measured", "", Table([], rows), details=study.workload["notes"])


def _listed(categories: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in categories.items())


def plain_text(table: Table) -> Sequence[str]:
    """The table as lines of Markdown."""
    header = table.header or [""] * len(table.rows[0])
    marks = ["---", *["---:"] * (len(header) - 1)] if table.header else ["---"] * len(header)
    return [
        "| " + " | ".join(re.sub(r"[|<]", r"\\\g<0>", cell) for cell in row) + " |"
        for row in (header, marks, *table.rows)
    ]
