"""What the terminal shows of a bench: the verdicts, and the two tables that matter most."""

from typing import TYPE_CHECKING

from outrider.bench.sections import Table, headline, sections
from outrider.bench.study import Study

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 3  # sections; the report has them all


def show(console: "Console", study: Study) -> None:
    """Print the most important sections."""
    if study.label:
        console.print(study.label, style="bold yellow")
    console.print(headline(study), style="bold")
    for section in sections(study)[:SHOWN]:
        if section.table is None:
            style = "green" if study.verdict.is_lossless else "bold red"
            console.print(f"\n{section.title}: {section.words}", style=style)
        else:
            console.print()
            show_table(console, section.table, section.title)
        for line in section.details:
            console.print(f"  {line}", style="dim")


def show_table(console: "Console", table: Table, title: str) -> None:
    """One table; headers break at spaces so that it stays narrow."""
    from rich import box
    from rich.table import Table as RichTable

    shown = RichTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, name in enumerate(table.header):
        justify = "left" if index == 0 else "right"
        shown.add_column(name.replace(" ", "\n"), justify=justify, vertical="bottom")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
