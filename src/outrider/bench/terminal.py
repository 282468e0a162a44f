"""What the terminal shows of a bench: the verdicts, and the two tables that matter most."""

from textwrap import wrap
from typing import TYPE_CHECKING

from outrider.bench.sections import Table, busy, case_name, headline, number, ratio, times
from outrider.bench.study import Study
from outrider.bench.summary import Kind, Measurement
from outrider.bench.timing import Spread

if TYPE_CHECKING:
    from rich.console import Console

HEADER_WIDTH = 8  # of "speed-up"; so that the tables fit in 80 columns

MOST_COLUMNS = 1000  # a table without borders is asked how wide it would like to be


def show(console: "Console", study: Study) -> None:
    """Print the most important numbers; the report has them all."""
    if study.label:
        console.print(study.label, style="bold yellow")
    console.print(headline(study), style="bold" if study.verdict.is_lossless else "bold red")
    show_table(console, _speeds(study.measurements))
    if not study.label:
        one = study.measurements[0]
        show_table(console, _kinds(one.kinds), f"one request, {case_name(one)}, by kind of prompt")
    if study.contexts:
        show_table(console, _contexts(study.contexts), "one request, by length of the context")
    for one in study.measurements:
        if one.loops.num_looping:
            console.print(
                f"{case_name(one)}: {one.loops.num_looping} of {one.loops.num_answers} answers end "
                f"in a loop ({one.loops.token_share:.0%} of the tokens, left out of decoding)"
            )
    for one in study.verdict.differences:
        console.print(
            f"prompt {one['prompt']}, {one['side']}, batch {one['batch']}: differs at token "
            f"{one['position']}, after …{one['context']!r}: plain {one['plain_token']!r}, "
            f"here {one['other_token']!r}"
        )

    for note in [*study.workload["notes"], *busy(study.provenance)]:
        console.print(f"· {note}")


def show_table(console: "Console", table: Table, title: str = "") -> None:
    """One table; headers break at spaces so that it stays narrow.

    Where even that is wider than the terminal, every row becomes a list: cut figures are wrong.
    """
    from rich.measure import Measurement as Width
    from rich.table import Table as RichTable

    shown = RichTable(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
    )
    for index, name in enumerate(table.header):
        justify = "left" if index == 0 else "right"
        lines = wrap(name, HEADER_WIDTH, break_on_hyphens=False) if index else [name]
        header = "\n".join(lines)
        shown.add_column(header, justify=justify, vertical="bottom", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    console.print()
    if (
        Width.get(console, console.options.update(max_width=MOST_COLUMNS), shown).maximum
        > console.width
    ):
        _show_list(console, table, title)
    else:
        console.print(shown)


def _show_list(console: "Console", table: Table, title: str) -> None:
    if title:
        console.print(title, style="bold")
    first, *names = table.header
    for row in table.rows:
        console.print(" ".join(filter(None, (row[0], first))), style="bold")
        for name, cell in zip(names, row[1:], strict=True):
            if cell:
                console.print(f"  {name.replace('/ ', '/')}: {cell}")


def _speeds(many: list[Measurement]) -> Table:
    header = ["", "plain tok/s", "spec. tok/s", "speed-up", "decode", "tokens/ forward", "first ms"]
    rows = [
        [
            case_name(one),
            f"{one.plain.tokens_per_second.median:.0f}",
            f"{one.speculative.tokens_per_second.median:.0f}",
            ratio(one.speedup),
            times(one.decode_speedup),
            number(one.acceptance_length),
            f"{1e3 * one.speculative.first_token_seconds.median:.0f}",
        ]
        for one in many
    ]
    return Table(header, rows)


def _contexts(many: list[Measurement]) -> Table:
    header = ["tokens", "plain tok/s", "spec. tok/s", "decode", "tokens/ forward", "first ms"]
    rows = [
        [
            str(one.context_tokens),
            _median(one.plain.decode_tokens_per_second),
            _median(one.speculative.decode_tokens_per_second),
            ratio(one.decode_speedup),
            number(one.acceptance_length),
            f"{1e3 * one.speculative.first_token_seconds.median:.0f}",
        ]
        for one in many
    ]
    return Table(header, rows)


def _kinds(kinds: list[Kind]) -> Table:
    header = ["", "prompts", "plain tok/s", "spec. tok/s", "decode", "tokens/ forward", "kept"]
    rows = [
        [
            kind.category,
            str(kind.num_prompts),
            _median(kind.plain),
            _median(kind.speculative),
            ratio(kind.speedup),
            number(kind.acceptance_length),
            number(kind.draft_acceptance_rate, "{:.0%}"),
        ]
        for kind in kinds
    ]
    return Table(header, rows)


def _median(value: Spread | None) -> str:
    return number(value and value.median, "{:.0f}")
