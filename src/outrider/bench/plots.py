"""Plots of a bench as SVG. matplotlib is an extra; without it a report has only tables."""

import importlib
import importlib.util
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from outrider.bench.configs import PLAIN as PLAIN_SIDE
from outrider.bench.sections import FEW_DRAFTS, case_name, phases_of, times
from outrider.bench.study import Study
from outrider.bench.timing import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "pip install 'outrider[bench]'"
PLAIN, SPECULATIVE = "#9aa5b1", "#1f6feb"
PHASE_COLOURS = {"draft": "#e8a33d", "verify": "#1f6feb", "other": "#9aa5b1"}
# Characters that no XML may hold, not even as an escape.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
WIDE_NAME = 20  # characters; four names of more do not fit above a plot
MARKS = "os^Dv"
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


@dataclass(slots=True)
class Side:
    """What is drawn of one side: a value for each row, and its ratio to the first side's."""

    name: str
    values: list[Spread | None]
    ratios: list[Spread | None] = field(default_factory=list)


def groups_of_bars(axes: "Axes", rows: list[str], sides: list[Side]) -> None:
    """Horizontal bars of all sides of each row with their spread, and the ratios at the ends."""
    step = 0.8 / len(sides)
    is_pair = len(sides) == 2
    colours = (PLAIN, *LINES * len(sides))[: len(sides)]
    for number, (side, colour) in enumerate(zip(sides, colours, strict=True)):
        for row, value in enumerate(side.values):
            if value is None:
                continue
            y = row - 0.4 + step * (number + 0.5)
            axes.barh(y, value.median, 0.9 * step, color=colour)
            axes.plot([value.low, value.high], [y] * 2, color="#24292f", lw=1.2)
            plain = sides[0].values[row]
            if number and plain is not None:
                # One ratio stands between its two bars, several each behind its own.
                place = (max(plain.high, value.high), row) if is_pair else (value.high, y)
                label(axes, *place, times(side.ratios[row]), fontweight="bold")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.tick_params(axis="y", length=0)
    handles = [axes.barh(0, 0, color=colour) for colour in colours]
    _legend_above(axes, handles, [side.name for side in sides])


def _legend_above(axes: "Axes", handles: list[Any], names: list[str]) -> None:
    wide = max(map(len, names)) > WIDE_NAME
    columns = min(len(names), 2 if wide else 4)
    axes.legend(handles, names, loc="lower left", ncols=columns, bbox_to_anchor=(0, 1))


def label(axes: "Axes", x: float, y: float, text: str, **style: Any) -> None:
    """Text to the right of a bar; a space before it would be lost in an SVG."""
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", **style)


def _sides(
    study: Study,
    cases: list[list[Any]],
    plain: Callable[[Any], Spread | None],
    speculative: Callable[[Any], Spread | None],
    gain: Callable[[Any], Spread | None],
) -> list[Side]:
    """All sides over cases, each of which has something of every config."""
    return [
        Side(PLAIN_SIDE, [plain(case[0]) for case in cases]),
        *(
            Side(
                study.side(name),
                [speculative(case[number]) for case in cases],
                [gain(case[number]) for case in cases],
            )
            for number, name in enumerate(study.configs)
        ),
    ]


def _speedups(axes: "Axes", study: Study) -> None:
    cases = study.cases(study.measurements)
    sides = _sides(
        study,
        cases,
        lambda one: one.plain.tokens_per_second,
        lambda one: one.speculative.tokens_per_second,
        lambda one: one.speedup,
    )
    groups_of_bars(axes, [case_name(case[0]) for case in cases], sides)
    axes.set_xlabel("output tokens per second, all requests together")


def _kinds(axes: "Axes", study: Study) -> None:
    case = study.cases(study.measurements)[0]
    kinds = list(zip(*(one.kinds for one in case), strict=True))
    sides = _sides(
        study,
        [list(of_one) for of_one in kinds],
        lambda kind: kind.plain,
        lambda kind: kind.speculative,
        lambda kind: kind.speedup,
    )
    groups_of_bars(axes, [of_one[0].category for of_one in kinds], sides)
    axes.set_xlabel("decoded tokens per second of one request")


def _positions(axes: "Axes", study: Study) -> None:
    """Of all batch sizes; of several configs at the first one, or lines would hide each other."""
    many = study.measurements[: len(study.configs)] if study.has_several else study.measurements
    lines = [
        (number, place, source)
        for number, one in enumerate(many)
        for place, source in enumerate(one.sources)
    ]
    for line, (number, place, source) in enumerate(lines):
        colour = LINES[(number if study.has_several else line) % len(LINES)]
        mark = MARKS[(place if study.has_several else 0) % len(MARKS)]
        shares = [(i, 100 * kept / of, of) for i, (kept, of) in enumerate(source.places, 1) if of]
        sure = [share for share in shares if share[2] >= FEW_DRAFTS]
        # Without the last sure place the faint part would float on its own.
        faint = shares[max(0, len(sure) - 1) :]
        axes.plot(*_xy(faint), f"{mark}:", ms=3, color=colour, alpha=0.35)
        name = many[number].config if study.has_several else case_name(many[number])
        name = name if name == source.name else f"{source.name}, {name}"
        axes.plot(*_xy(sure), f"{mark}-", ms=4, color=colour, label=name)
    where = f" at {case_name(many[0])}" if study.has_several else ""
    axes.set_xlabel(f"place in the draft{where} (faint: of fewer than {FEW_DRAFTS} drafts)")
    axes.set_ylabel("kept of submitted, %")
    axes.set_ylim(0, 105)
    if lines:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _xy(places: list[tuple[int, float, int]]) -> tuple[list[int], list[float]]:
    return [place for place, _, _ in places], [share for _, share, _ in places]


def _contexts(axes: "Axes", study: Study) -> None:
    cases = study.cases(study.contexts)
    sides = _sides(
        study,
        cases,
        lambda one: one.plain.decode_tokens_per_second,
        lambda one: one.speculative.decode_tokens_per_second,
        lambda one: one.decode_speedup,
    )
    groups_of_bars(axes, [f"{case[0].context_tokens} tokens" for case in cases], sides)
    axes.set_xlabel("decoded tokens per second of one request")


def _phases(axes: "Axes", study: Study) -> None:
    names: list[str] = []
    for name, side in phases_of(study):
        left = 0.0
        for phase, value in side.milliseconds_per_step.items():
            axes.barh(len(names), value, 0.6, left=left, color=PHASE_COLOURS[phase])
            left += value
        names.append(name)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds per step")
    handles = [axes.barh(0, 0, color=colour) for colour in PHASE_COLOURS.values()]
    _legend_above(axes, handles, list(PHASE_COLOURS))


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
    """How a plot is drawn, and its size in inches by the number of its bars."""

    def __init__(
        self, draw: Callable[["Axes", Study], None], num_bars: Callable[[Study], int] | None = None
    ) -> None:
        self.draw = draw
        self._num_bars = num_bars

    def size(self, study: Study) -> tuple[float, float]:
        if self._num_bars is None:
            return 7.5, 3.0
        return 7.5, 1.2 + 0.25 * self._num_bars(study)


def _grouped(num_rows: Callable[[Study], int]) -> Callable[[Study], int]:
    """One bar for plain decoding and one for each config in every row."""
    return lambda study: (1 + len(study.configs)) * num_rows(study)


_FIGURES = {
    "speedups": _Figure(_speedups, _grouped(lambda study: len(study.cases(study.measurements)))),
    "kinds": _Figure(_kinds, _grouped(lambda study: len(study.measurements[0].kinds))),
    "positions": _Figure(_positions),
    "contexts": _Figure(_contexts, _grouped(lambda study: len(study.cases(study.contexts)))),
    "phases": _Figure(_phases, lambda study: 2 * len(phases_of(study))),
    "forward": _Figure(_forward),
}
