"""A run as a picture: loss, agreement by depth, and acceptance lengths on held-out texts."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import DataError
from outrider.training.log import read_log
from outrider.writing import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMED = 16  # lines of one picture; a legend of more would hide it
Lines = list[dict[str, Any]]


def draw_curve(directory: Path) -> Path | None:
    """Write curve.png beside the log; None where matplotlib is not installed.

    Raises:
        DataError: it cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = read_log(directory)
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, agreement, length = figure.subplots(1, 3)
    _loss(loss, lines)
    _agreement(agreement, [line for line in lines if "agreement" in line])
    _length(length, [line for line in lines if line.get("held_out")])
    for axes in (loss, agreement, length):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if 0 < len(axes.get_legend_handles_labels()[0]) <= MOST_NAMED:
            axes.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    path = directory / "curve.png"
    try:
        with whole_file(path) as file:
            file.write(buffer.getvalue())
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
    return path


def _loss(axes: "Axes", lines: Lines) -> None:
    axes.set_title("Loss", loc="left")
    trained = [line for line in lines if "loss" in line]
    axes.plot([x["step"] for x in trained], [x["loss"] for x in trained], label="trained on")
    held = [line for line in lines if line.get("held_out")]
    if held:
        values = [line["held_out"]["loss"] for line in held]
        axes.plot([x["step"] for x in held], values, "o-", ms=3, label="held out")


def _agreement(axes: "Axes", lines: Lines) -> None:
    axes.set_title("The target's best token, by depth", loc="left")
    for depth in range(len(lines[0]["agreement"]) if lines else 0):
        values = [line["agreement"][depth] for line in lines]
        axes.plot([line["step"] for line in lines], values, lw=1, label=str(depth + 1))


def _length(axes: "Axes", lines: Lines) -> None:
    axes.set_title("Acceptance length, held out", loc="left")
    steps = [line["step"] for line in lines]
    values = [line["held_out"]["acceptance_length"] for line in lines]
    axes.plot(steps, values, "o-", ms=3, color="black", label="all")
    for category in sorted({name for line in lines for name in line["held_out"]["by_category"]}):
        found = [line["held_out"]["by_category"].get(category) for line in lines]
        axes.plot(steps, found, lw=1, label=category)
