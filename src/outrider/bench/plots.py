"""Plots of a bench as SVG. matplotlib is an extra; without it a report has only tables."""

import importlib
import importlib.util
import io
import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from outrider.bench.sections import FEW_DRAFTS, case_name, times
from outrider.bench.study import Study
from outrider.bench.timing import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "pip install 'outrider[bench]'"
PLAIN, SPECULATIVE = "#9aa5b1", "#1f6feb"
PHASE_COLOURS = {"draft": "#e8a33d", "verify": "#1f6feb", "other": "#9aa5b1"}
# Characters that no XML may hold, not even as an escape.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
LINES = ("#1f6feb", "#e8a33d", "#2da44e", "#bf3989", "#8250df", "#57606a")


@cache
def why_no_plots() -> str:
    """Why nothing can be drawn; "" where it can. Imports: what is installed may be broken."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"matplotlib is not installed; for them: {INSTALL}"
    try:
        importlib.import_module("matplotlib.pyplot")
    except Exception as error:
        return f"matplotlib cannot be imported ({type(error).__name__}: {error})"
    return ""


def can_plot() -> bool:
    """Whether there is a matplotlib that works."""
    return not why_no_plots()


def figure(name: str, study: Study) -> str:
    """One plot as an SVG element, "" where there is nothing to draw."""
    drawn = _FIGURES[name]
    width, height = drawn.size(study)
    return svg(lambda axes: drawn.draw(axes, study), width, height)


def svg(draw: Callable[["Axes"], None], width: float, height: float) -> str:
    """What `draw` puts into one pair of axes, in inches, as an SVG element for a page."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: small, and in the page's own font
        "svg.hashsalt": "outrider",  # the same numbers give the same file
        "text.parse_math": False,  # a "$" in a name is a "$"
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#8c959f",
        "axes.labelcolor": "#24292f",
        "xtick.color": "#24292f",
        "ytick.color": "#24292f",
        "legend.frameon": False,
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # The page has fonts for what matplotlib's own cannot measure.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        canvas, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
        draw(axes)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(canvas)
    text = NOT_XML.sub("?", buffer.getvalue())
    return text[text.index("<svg") :]


def pairs_of_bars(
    axes: "Axes",
    names: list[str],
    plain: list[Spread | None],
    other: list[Spread | None],
    ratios: list[Spread | None],
) -> None:
    """Horizontal bars of two sides with their spread, and the ratio at the end."""
    for row, (slow, fast, ratio) in enumerate(zip(plain, other, ratios, strict=True)):
        for value, offset, colour in ((slow, 0.2, PLAIN), (fast, -0.2, SPECULATIVE)):
            if value is not None:
                axes.barh(row - offset, value.median, 0.36, color=colour)
                axes.plot([value.low, value.high], [row - offset] * 2, color="#24292f", lw=1.2)
        if slow is not None and fast is not None:
            end = max(fast.high, slow.high)
            label(axes, end, row, times(ratio), fontweight="bold")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    handles = [axes.barh(0, 0, color=colour) for colour in (PLAIN, SPECULATIVE)]
    axes.legend(handles, ("plain", "speculative"), loc="lower left", ncols=2, bbox_to_anchor=(0, 1))


def label(axes: "Axes", x: float, y: float, text: str, **style: Any) -> None:
    """Text to the right of a bar; a space before it would be lost in an SVG."""
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", **style)


def _speedups(axes: "Axes", study: Study) -> None:
    many = study.measurements
    pairs_of_bars(
        axes,
        [case_name(one) for one in many],
        [one.plain.tokens_per_second for one in many],
        [one.speculative.tokens_per_second for one in many],
        [one.speedup for one in many],
    )
    axes.set_xlabel("output tokens per second, all requests together")


def _kinds(axes: "Axes", study: Study) -> None:
    kinds = study.measurements[0].kinds
    names = [kind.category for kind in kinds]
    plain, other = [kind.plain for kind in kinds], [kind.speculative for kind in kinds]
    pairs_of_bars(axes, names, plain, other, [kind.speedup for kind in kinds])
    axes.set_xlabel("decoded tokens per second of one request")


def _positions(axes: "Axes", study: Study) -> None:
    number = 0
    for one in study.measurements:
        for source in one.sources:
            shares = [
                (i, 100 * kept / of, of) for i, (kept, of) in enumerate(source.places, 1) if of
            ]
            sure = [place for place in shares if place[2] >= FEW_DRAFTS]
            colour = LINES[number % len(LINES)]
            # Without the last sure place the faint part would float on its own.
            faint = shares[max(0, len(sure) - 1) :]
            axes.plot(*_xy(faint), "o:", ms=3, color=colour, alpha=0.35)
            name = f"{source.name}, {case_name(one)}"
            axes.plot(*_xy(sure), "o-", ms=4, color=colour, label=name)
            number += 1
    axes.set_xlabel(f"place in the draft (faint: of fewer than {FEW_DRAFTS} drafts)")
    axes.set_ylabel("kept of submitted, %")
    axes.set_ylim(0, 105)
    if number:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _xy(places: list[tuple[int, float, int]]) -> tuple[list[int], list[float]]:
    return [place for place, _, _ in places], [share for _, share, _ in places]


def _contexts(axes: "Axes", study: Study) -> None:
    names = [f"{one.context_tokens} tokens" for one in study.contexts]
    plain = [one.plain.decode_tokens_per_second for one in study.contexts]
    other = [one.speculative.decode_tokens_per_second for one in study.contexts]
    pairs_of_bars(axes, names, plain, other, [one.decode_speedup for one in study.contexts])
    axes.set_xlabel("decoded tokens per second of one request")


def _phases(axes: "Axes", study: Study) -> None:
    names: list[str] = []
    for one in study.measurements:
        for name, side in (("plain", one.plain), ("speculative", one.speculative)):
            left = 0.0
            for phase, value in side.milliseconds_per_step.items():
                axes.barh(len(names), value, 0.6, left=left, color=PHASE_COLOURS[phase])
                left += value
            names.append(f"{case_name(one)}, {name}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds per step")
    handles = [axes.barh(0, 0, color=colour) for colour in PHASE_COLOURS.values()]
    axes.legend(handles, list(PHASE_COLOURS), loc="lower left", ncols=3, bbox_to_anchor=(0, 1))


def _forward(axes: "Axes", study: Study) -> None:
    cost = study.forward
    assert cost is not None
    middle = [1e3 * one.median for one in cost.seconds]
    low, high = ([1e3 * getattr(one, end) for one in cost.seconds] for end in ("low", "high"))
    axes.fill_between(cost.rows, low, high, color=SPECULATIVE, alpha=0.2, lw=0)
    axes.plot(cost.rows, middle, "o-", ms=4, color=SPECULATIVE)
    axes.set_xscale("log", base=2)
    axes.set_xticks(cost.rows, [str(count) for count in cost.rows])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("new rows in one forward")
    axes.set_ylabel("milliseconds")


class _Figure:
    """How a plot is drawn, and its size in inches by the number of its rows."""

    def __init__(
        self, draw: Callable[["Axes", Study], None], num_rows: Callable[[Study], int] | None = None
    ) -> None:
        self.draw = draw
        self._num_rows = num_rows

    def size(self, study: Study) -> tuple[float, float]:
        if self._num_rows is None:
            return 7.5, 3.0
        return 7.5, 1.2 + 0.5 * self._num_rows(study)


_FIGURES = {
    "speedups": _Figure(_speedups, lambda study: len(study.measurements)),
    "kinds": _Figure(_kinds, lambda study: len(study.measurements[0].kinds)),
    "positions": _Figure(_positions),
    "contexts": _Figure(_contexts, lambda study: len(study.contexts)),
    "phases": _Figure(_phases, lambda study: 2 * len(study.measurements)),
    "forward": _Figure(_forward),
}
