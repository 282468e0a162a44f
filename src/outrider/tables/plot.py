"""Coverage as a picture: tokens per step and hit rates against the size of a table."""

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import MissingDependency, TableError
from outrider.tables.coverage import Coverage, recommended
from outrider.tables.files import kind_of, named, reason
from outrider.writing import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
TABLE_COLOURS = ("#1f6feb", "#e8a33d", "#2da44e", "#bf3989", "#8250df", "#57606a")
TABLE_LINES = ("-", "--", "-.", ":")  # with the colours, 24 tables differ
KEY_COLOURS = ("#8cc5e3", "#57a5d8", "#2f7fc1", "#1f5a9e", "#153e75", "#081d3a")  # 1 to 6 tokens
COLUMNS = 2
PANEL = (6.0, 3.6)  # inches, the legend beside it included


def check_plot(path: Path) -> None:
    """Refuse what `plot` could not write, before there is anything to plot.

    Raises:
        TableError: no name of a picture, or a directory that cannot be written.
        MissingDependency: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise TableError(f"--plot must name a file that ends in .png or .svg, got {named(path)!r}")
    try:
        kind = kind_of(path.stat())
    except FileNotFoundError:
        kind = None
    except OSError as error:
        raise TableError(f"cannot write the plot {named(path)}: {reason(error)}") from error
    if kind is not None:
        raise TableError(f"cannot write the plot {named(path)}: it is {kind}")
    if not path.parent.is_dir():
        raise TableError(f"cannot write the plot {named(path)}: no directory {named(path.parent)}")
    if not os.access(path.parent, os.W_OK):
        raise TableError(f"cannot write the plot {named(path)}: {named(path.parent)} is read-only")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "the plot needs matplotlib: pip install 'outrider[bench]'"
        ) from error


def plot(curves: Mapping[str, Sequence[Coverage]], path: Path) -> None:
    """Write the picture: one panel for all tables, then one per table by length of the key.

    Raises:
        TableError: the file cannot be written; what was there before is left.
    """
    from matplotlib.figure import Figure

    rows = -(-(1 + len(curves)) // COLUMNS)
    size = (COLUMNS * PANEL[0], rows * PANEL[1])
    figure = Figure(figsize=size, layout="constrained")
    panels: list[Axes] = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    names = _short(list(curves))
    _tokens_per_step(panels[0], names, curves)
    for panel, name in zip(panels[1:], curves, strict=False):
        _hits(panel, names[name], curves[name])
    for panel in panels[1 + len(curves) :]:
        panel.set_axis_off()
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:].lower(), dpi=150)
    _write(path, buffer.getvalue())


def _tokens_per_step(
    axes: "Axes", names: Mapping[str, str], curves: Mapping[str, Sequence[Coverage]]
) -> None:
    for index, (name, sizes) in enumerate(curves.items()):
        colour = TABLE_COLOURS[index % len(TABLE_COLOURS)]
        line = TABLE_LINES[index // len(TABLE_COLOURS) % len(TABLE_LINES)]
        best = recommended(sizes)
        lengths = [size.acceptance_length for size in sizes]
        axes.plot(_sizes(sizes), lengths, "o", ls=line, color=colour, ms=5, label=names[name])
        axes.plot(*_point(best), "*", color=colour, ms=16, mec="white", mew=1, zorder=3)
    axes.plot([], [], "*", color="#57606a", ms=12, ls="none", label="recommended size")
    axes.set_ylabel("tokens per step")
    axes.set_title("Tokens per step, bonus token included", fontsize="medium", loc="left")
    _finish(axes)


def _hits(axes: "Axes", name: str, sizes: Sequence[Coverage]) -> None:
    for place, key in enumerate(sizes[0].keys):
        rates = [100 * size.keys[place].hit_rate for size in sizes]
        colour = KEY_COLOURS[(key.key_length - 1) % len(KEY_COLOURS)]
        label = "1 token" if key.key_length == 1 else f"{key.key_length} tokens"
        axes.plot(_sizes(sizes), rates, "o-", color=colour, ms=4, label=label)
    axes.set_ylabel("places, %")
    axes.set_title(f"{name}: longest key that it has", fontsize="medium", loc="left")
    axes.set_ylim(bottom=0)
    _finish(axes)


def _finish(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xlabel("size of the table, MiB")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#d0d7de", lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _sizes(sizes: Sequence[Coverage]) -> list[float]:
    return [size.num_bytes / (1 << 20) for size in sizes]


def _point(size: Coverage) -> tuple[list[float], list[float]]:
    return [size.num_bytes / (1 << 20)], [size.acceptance_length]


def _short(names: Sequence[str], most: int = 28) -> dict[str, str]:
    """The files' names where these differ, else the ends of their paths."""
    bases = [Path(name).name for name in names]
    if len(set(bases)) < len(bases):
        bases = list(names)
    return {
        name: named(base if len(base) <= most else "…" + base[1 - most :])
        for name, base in zip(names, bases, strict=True)
    }


def _write(path: Path, content: bytes) -> None:
    """All of the file or nothing."""
    try:
        with whole_file(Path(os.path.realpath(path))) as file:
            file.write(content)
    except OSError as error:
        raise TableError(f"cannot write the plot {named(path)}: {reason(error)}") from error
