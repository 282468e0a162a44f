"""What a comparison of peers says, as tables and plots."""

import json
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.peers.compare import BF16, Comparison, Decoded
from outrider.bench.plots import PLAIN, SPECULATIVE, label, svg
from outrider.bench.provenance import write_whole
from outrider.bench.repetition import loop_start
from outrider.bench.report import as_html, write_markdown
from outrider.bench.sections import NOTHING, Section, Table, busy, counted, times, with_spread
from outrider.bench.sections import ratio as ratio_text
from outrider.bench.timing import Spread, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "outrider and its peers"
OPEN_TEXT = "chat"  # category whose answers repeat little of the prompt
PLAIN_VARIANT = "plain"


@dataclass(frozen=True, slots=True)
class Column:
    """One way of looking at the calls: a batch size and some of the prompts."""

    name: str
    batch: int
    indices: frozenset[int]


def columns(result: Comparison) -> list[Column]:
    """One per batch size; at batch 1 open text and all other kinds are apart."""
    every = frozenset(range(len(result.prompts)))
    open_text = frozenset(i for i in every if result.prompts[i].category == OPEN_TEXT)
    found = []
    for batch in result.settings.batches:
        if batch == 1 and open_text and open_text != every:
            found.append(Column(f"batch 1, all but {OPEN_TEXT}", 1, every - open_text))
            found.append(Column(f"batch 1, {OPEN_TEXT}", 1, open_text))
        else:
            found.append(Column(f"batch {batch}", batch, every))
    return found


def kinds(result: Comparison) -> list[Column]:
    """Every category on its own, at batch 1."""
    if 1 not in result.settings.batches:
        return []
    names = sorted({prompt.category for prompt in result.prompts})
    return [
        Column(name, 1, frozenset(i for i, p in enumerate(result.prompts) if p.category == name))
        for name in names
    ]


def rates(one: Decoded, column: Column) -> list[float]:
    """New tokens per second of every round, prompts included; empty: not measured."""
    found = []
    for calls in one.rounds.get(column.batch, []):
        chosen = [call for call in calls if column.indices.issuperset(call.indices)]
        seconds = sum(call.seconds for call in chosen)
        if seconds:
            found.append(sum(len(ids) for call in chosen for ids in call.token_ids) / seconds)
    return found


def ratio(ours: Decoded, other: Decoded, column: Column) -> Spread | None:
    """How many times as fast as the other we are, round by round."""
    fast, slow = rates(ours, column), rates(other, column)
    if not fast or len(fast) != len(slow):
        return None
    return spread([a / b for a, b in zip(fast, slow, strict=True)])


def our_side(result: Comparison) -> Decoded | None:
    """outrider with drafts; None: it did not run."""
    ours = [one for one in result.decoded if one.side.peer.is_ours]
    return ours[-1] if ours else None


def best_peer(result: Comparison, column: Column, dtype: str = BF16) -> Decoded | None:
    """The fastest other engine with this number format."""
    able = [
        one
        for one in result.decoded
        if not one.side.peer.is_ours and one.side.dtype == dtype and rates(one, column)
    ]
    return max(able, key=lambda one: spread(rates(one, column)).median, default=None)


def headline(result: Comparison) -> str:
    """Against the best of the others, in one sentence."""
    ours, parts = our_side(result), []
    for column in columns(result):
        best = best_peer(result, column)
        if ours is not None and best is not None:
            value = times(ratio(ours, best, column))
            parts.append(f"{column.name}: {value} ({best.side.name})")
    if not parts:
        return "No peer was measured."
    return "outrider over the fastest bf16 peer. " + "; ".join(parts) + "."


def speed(value: float) -> str:
    """Tokens per second with two digits or more: ``160``, ``16``, ``1.6``, ``0.16``."""
    decimals = 0 if value <= 0 else min(9, max(0, 1 - floor(log10(value))))
    return f"{value:.{decimals}f}"


def speed_range(value: Spread) -> str:
    """Median and range: ``61 (58–63)``, ``1.6 (1.4–1.7)``."""
    decimals = len(speed(value.median).partition(".")[2])
    return with_spread(value, f"{{:.{decimals}f}}")


def machine(facts: dict[str, Any]) -> str:
    """What it ran on, how busy that was, and what outrider was."""
    load = facts.get("load_average")
    parts = [
        f"{facts['cpu']}, {counted(facts['cores'], 'core')}",
        f"{counted(facts['threads'], 'thread')} for every engine, on as many cores",
        facts["system"],
        f"Python {facts['python']}",
        "outrider "
        + facts["versions"]["outrider"]
        + (f", commit {facts['commit']}" if facts["commit"] else ""),
    ]
    if load:
        parts.append(f"load average at the start {load[0]:.1f}")
    return "; ".join(parts)


def remarks(result: Comparison) -> list[str]:
    """What a reader of the figures has to know: a busy machine, prompts and peers left out."""
    return [*busy(result.provenance), *result.workload["notes"], *result.notes]


def speeds(result: Comparison) -> Table:
    """Tokens per second of all sides."""
    shown = columns(result)
    rows = [
        [
            one.side.name,
            *(speed_range(spread(r)) if (r := rates(one, column)) else NOTHING for column in shown),
        ]
        for one in result.decoded
    ]
    return Table(["tokens/s", *(column.name for column in shown)], rows)


def ratios(result: Comparison) -> Table | None:
    """outrider with drafts over every other side."""
    ours, shown = our_side(result), columns(result)
    if ours is None:
        return None
    rows = [
        [one.side.name, *(ratio_text(ratio(ours, one, c)) for c in shown)]
        for one in result.decoded
        if one is not ours
    ]
    return Table(["times as fast as", *(column.name for column in shown)], rows)


def sections(result: Comparison) -> list[Section]:
    """Everything a report tells."""
    settings = result.settings
    length = "exactly" if settings.ignore_eos else "at most"
    parts = [
        Section(
            "Speed",
            f"New tokens per second over the wall time of the calls, prompts included. Everybody "
            f"got the same token ids and decoded greedily {length} {settings.max_tokens} tokens on "
            f"{counted(settings.num_threads, 'thread')}, taking turns call by call; medians over "
            f"{counted(result.finished_rounds, 'round')}. Differences under 15 % are noise on most "
            "machines.",
            speeds(result),
            details=remarks(result),
        )
    ]
    parts += [
        Section(column.name.capitalize(), "", figure=str(i))
        for i, column in enumerate(columns(result))
    ]
    table = ratios(result)
    if table is not None:
        words = "How many times as fast outrider with drafts is: ratios of the same round."
        parts.append(Section("outrider over each", words, table))
    if len(kinds(result)) > 1:
        parts.append(Section("By kind of prompt", "At batch 1.", _kind_table(result)))
    return [*parts, _texts(result), _method(result)]


def write_peer_report(result: Comparison, path: Path) -> None:
    """Write `path` as HTML, or as Markdown when it ends in .md."""
    facts = result.provenance
    threads = counted(facts["threads"], "thread")
    about = f"{result.model} · {facts['cpu']}, {threads} · {facts['date'][:10]}"

    def draw(name: str) -> str:
        return _bars(result, columns(result)[int(name)])

    parts = sections(result)
    if path.suffix == ".md":
        write_markdown(path, TITLE, about, result.label, headline(result), parts, draw)
    else:
        write_whole(path, as_html(TITLE, about, result.label, headline(result), parts, draw))


def _kind_table(result: Comparison) -> Table:
    shown = kinds(result)
    rows = []
    for one in result.decoded:
        found = [rates(one, column) for column in shown]
        rows.append([one.side.name, *(speed(spread(r).median) if r else NOTHING for r in found)])
    return Table(["tokens/s", *(column.name for column in shown)], rows)


def _texts(result: Comparison) -> Section:
    plain = {
        (one.side.peer.name, one.side.dtype): _answers(one)
        for one in result.decoded
        if one.side.variant == PLAIN_VARIANT
    }
    ours = next((a for (name, _), a in plain.items() if name == "outrider"), {})
    rows = []
    for one in result.decoded:
        answers = _answers(one)
        looped = sum(
            len(ids) - start for ids in answers.values() if (start := loop_start(ids)) is not None
        )
        total = sum(len(ids) for ids in answers.values())
        own = plain.get((one.side.peer.name, one.side.dtype), {})
        rows.append(
            [
                one.side.name,
                _same(answers, own),
                _same(answers, ours),
                f"{looped / max(1, total):.0%}",
                speed(one.load_seconds),
            ]
        )
    header = ["", "as its own plain text", "as outrider's plain text", "tokens in loops", "load, s"]
    words = (
        "Answers at the first batch size. Rounding differs between engines, so texts drift apart; "
        "but an engine whose speculative text is not its own plain text is not lossless. Text that "
        "loops is easy to draft."
    )
    return Section("Texts", words, Table(header, rows))


def _answers(one: Decoded) -> dict[int, list[int]]:
    """The first round's tokens by prompt, of the smallest batch size."""
    calls = one.rounds[min(one.rounds)][0]
    return {i: ids for call in calls for i, ids in zip(call.indices, call.token_ids, strict=True)}


def _same(answers: dict[int, list[int]], others: dict[int, list[int]]) -> str:
    both = answers.keys() & others.keys()
    if not both:
        return NOTHING
    return f"{sum(answers[i] == others[i] for i in both)} of {len(both)}"


def _method(result: Comparison) -> Section:
    facts = result.provenance
    rows = [
        ["model", result.model],
        ["prompts", ", ".join(f"{n} {name}" for name, n in result.workload["categories"].items())],
        ["machine", machine(facts)],
        *(
            [
                one.side.name,
                ", ".join(f"{name} {version}" for name, version in one.versions.items())
                + f"; {json.dumps(one.side.options, ensure_ascii=False)}",
            ]
            for one in result.decoded
        ),
        ["date", facts["date"]],
        ["command", facts["command"]],
    ]
    return Section("How it was measured", "", Table([], rows))


def _bars(result: Comparison, column: Column) -> str:
    measured = [(one, spread(r)) for one in result.decoded if (r := rates(one, column))]
    measured.sort(key=lambda pair: -pair[1].median)

    def draw(axes: "Axes") -> None:
        for row, (one, value) in enumerate(measured):
            colour = SPECULATIVE if one.side.peer.is_ours else PLAIN
            axes.barh(row, value.median, 0.62, color=colour)
            axes.plot([value.low, value.high], [row, row], color="#24292f", lw=1.2)
            label(axes, value.high, row, speed(value.median))
        axes.set_yticks(range(len(measured)), [one.side.name for one, _ in measured])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlim(left=0)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("new tokens per second")

    return svg(draw, 7.5, 0.9 + 0.32 * len(measured))
