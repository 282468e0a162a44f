"""What `outrider train` shows: progress of a run, and numbers in tables."""

from contextlib import ExitStack
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING

from outrider.cli.train_options import bar

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.training.evaluate import HeldOut
    from outrider.training.rollouts import Rollouts
    from outrider.training.run import Moment, Result
    from outrider.training.trainer import Report


class Show:
    """A bar where there is a terminal, and a line per report."""

    def __init__(self, num_steps: int, step: int, shown: bool) -> None:
        from outrider.cli.console import messages

        self._num_steps, self._first, self._shown = num_steps, step, shown
        self._console = messages()
        self._stack = ExitStack()
        self._started, self._tokens = monotonic(), 0

    def __enter__(self) -> "Show":
        if self._shown:
            self._advance = self._stack.enter_context(bar("training", self._num_steps, self._first))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def moment(self, moment: "Moment") -> None:
        """Tell of one step."""
        if not self._shown:
            return
        self._advance(1)
        if moment.report is not None:
            line = report_line(moment.report, self._num_steps)
            if not self._console.is_terminal:  # there the bar says it, and 80 columns are few
                line += f"  left {self._left(moment.step)}"
            self._console.print(line, soft_wrap=True)
        if moment.held_out is not None:
            self._console.print(f"  held out: {held_out_line(moment.held_out)}", soft_wrap=True)

    def _left(self, step: int) -> str:
        pace = (monotonic() - self._started) / max(1, step - self._first)
        return str(timedelta(seconds=round(pace * (self._num_steps - step))))


def report_line(report: "Report", num_steps: int) -> str:
    """One report: loss, agreement with the target by depth, speed."""
    depths = " ".join(f"{share:.2f}" for share in report.agreement)
    return (
        f"step {report.step:,}/{num_steps:,}  loss {report.loss:.3f}  agreement {depths}  "
        f"{report.tokens_per_second:,.0f} tokens/s"
    )


def held_out_line(held_out: "HeldOut") -> str:
    """Acceptance lengths, all and by category."""
    parts = [f"{name} {length:.2f}" for name, length in sorted(held_out.by_category.items())]
    return (
        f"loss {held_out.loss:.3f}  acceptance length {held_out.acceptance_length:.2f} "
        f"({', '.join(parts)})"
    )


def print_result(console: "Console", result: "Result") -> None:
    """Where the drafter is, and how good."""
    if result.held_out is not None:
        console.print(f"held out: {held_out_line(result.held_out)}", soft_wrap=True)
        depths = " ".join(f"{share:.2f}" for share in result.held_out.conditional)
        console.print(f"each depth, given those before it: {depths}", soft_wrap=True)
    if result.calibration is not None:
        before, after = result.calibration.mean_errors
        console.print(f"calibration error of survival: {before:.1%}, calibrated {after:.1%}")
    curve = "" if result.curve is None else f", curve: {result.curve}"
    console.print(f"drafter: {result.drafter}{curve}", soft_wrap=True)


def print_rollouts(console: "Console", found: "Rollouts") -> None:
    """Acceptance by category as a table, and loops under it."""
    from rich.table import Table

    table = Table("category", "prompts", "tokens per step", "accepted, by depth")
    for kind in found.kinds:
        length = kind.length
        table.add_row(
            kind.category,
            str(kind.num_prompts),
            f"{length.value:.2f} ({length.low:.2f}–{length.high:.2f})",
            " ".join(f"{share:.2f}" for share in kind.conditional),
        )
    console.print(table)
    console.print(
        "in brackets: 95 % of resampled prompts · by depth: given that all before it were; a step "
        "without a draft accepts nothing, depths that none came to are left out",
        style="dim",
    )
    loops = found.loops
    if loops.num_looping:
        console.print(
            f"{loops.num_looping} of {loops.num_answers} answers end in a loop: "
            f"{loops.token_share:.0%} of the tokens, {loops.length:.2f} per step there, left out "
            "above",
            soft_wrap=True,
        )
