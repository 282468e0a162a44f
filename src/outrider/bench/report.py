"""Reports of a bench: one HTML file with its plots inside, or Markdown with plots beside it."""

import html
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.bench.plots import NOT_XML, can_plot, figure
from outrider.bench.provenance import write_whole
from outrider.bench.sections import Section, Table, headline, plain_text, sections
from outrider.bench.study import Study

TITLE = "outrider bench"
STYLE = """
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
       color: #24292f; background: #fff; max-width: 72rem; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.9rem; margin: 0 0 .2rem; } h2 { font-size: 1.25rem; margin: 2.6rem 0 .4rem; }
p { max-width: 46rem; margin: .4rem 0 .8rem; } .lead { font-size: 1.2rem; }
.about { color: #57606a; margin: 0 0 1.2rem; }
.label { background: #fff1c2; border: 1px solid #d4a72c; border-radius: 6px; padding: .6rem 1rem;
         font-weight: 600; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th { font-weight: 600; font-size: .85rem; color: #57606a; vertical-align: bottom; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #d8dee4; text-align: right; }
td { white-space: nowrap; } table.facts td + td { white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
table.facts td { text-align: left; vertical-align: top; }
table.facts td:first-child { color: #57606a; }
/* What is wider than the page scrolls; a shadow at an edge says that there is more. */
.wide { overflow-x: auto; max-width: 100%; background:
        linear-gradient(to right, #fff 40%, transparent) left / 2.5rem 100% no-repeat local,
        linear-gradient(to left, #fff 40%, transparent) right / 2.5rem 100% no-repeat local,
        linear-gradient(to right, #0003, transparent) left / .9rem 100% no-repeat scroll,
        linear-gradient(to left, #0003, transparent) right / .9rem 100% no-repeat scroll; }
svg { max-width: 100%; min-width: 36rem; height: auto; margin: .4rem 0; }
@media (max-width: 40rem) { body { margin: 1rem auto; padding: 0 1rem; } h1 { font-size: 1.5rem; } }
svg text { font-family: inherit !important; }
ul { margin: .4rem 0; padding-left: 1.2rem; color: #57606a; }
"""


def write_report(study: Study, path: Path) -> None:
    """Write `path` as HTML, or as Markdown when it ends in .md."""
    if path.suffix == ".md":
        write_markdown(
            path,
            TITLE,
            about(study),
            study.label,
            headline(study),
            sections(study),
            lambda name: figure(name, study),
        )
    else:
        page = as_html(
            TITLE,
            about(study),
            study.label,
            headline(study),
            sections(study),
            lambda name: figure(name, study),
        )
        write_whole(path, page)


def about(study: Study) -> str:
    """Model and machine in one line."""
    facts = study.provenance
    return (
        f"{study.target['name']}, {study.target['dtype']} · {facts['cpu']}, "
        f"{facts['threads']} threads · {facts['date'][:10]}"
    )


def as_html(
    title: str,
    about: str,
    label: str,
    headline: str,
    parts: Sequence[Section],
    draw: Callable[[str], str],
) -> str:
    """A page that needs no other file."""
    body = [f"<h1>{_e(title)}</h1>", f'<p class="about">{_e(about)}</p>']
    if label:
        body.append(f'<p class="label">{_e(label)}</p>')
    body.append(f'<p class="lead">{_e(headline)}</p>')
    for part in parts:
        body.append(f"<h2>{_e(part.title)}{_e(f' ({label})') if label else ''}</h2>")
        if part.words:
            body.append(f"<p>{_e(part.words)}</p>")
        plot, problems = _drawn(part, draw)
        if plot:
            body.append(f'<div class="wide">{plot}</div>')
        if part.table is not None:
            body.append(_html_table(part.table))
        details = [*part.details, *problems]
        if details:
            body.append("<ul>" + "".join(f"<li>{_e(line)}</li>" for line in details) + "</ul>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_e(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def write_markdown(
    path: Path,
    title: str,
    about: str,
    label: str,
    headline: str,
    parts: Sequence[Section],
    draw: Callable[[str], str],
) -> None:
    """A page and, named after it, one SVG file for each plot."""
    lines = [f"# {title}", "", about, ""]
    if label:
        lines += [f"**{label}**", ""]
    lines += [headline, ""]
    for part in parts:
        lines += [f"## {part.title}{f' ({label})' if label else ''}", ""]
        if part.words:
            lines += [part.words, ""]
        plot, problems = _drawn(part, draw)
        if plot:
            picture = path.with_name(f"{path.stem}-{part.figure}.svg")
            header = '<?xml version="1.0" encoding="utf-8"?>\n'
            write_whole(picture, header + plot)
            lines += [f"![{part.title}]({picture.name})", ""]
        if part.table is not None:
            lines += [*plain_text(part.table), ""]
        details = [*part.details, *problems]
        if details:
            lines += [*(f"- {line}" for line in details), ""]
    write_whole(path, "\n".join(lines))


def json_text(study: Study) -> str:
    """The study as JSON, with lists of numbers on one line each."""
    text = json.dumps(study.as_json(), indent=1, ensure_ascii=False)
    # No JSON string holds a line end, so that nothing inside one is matched.
    return re.sub(r"\[\n[-+.\deE,\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


def _drawn(part: Section, draw: Callable[[str], str]) -> tuple[str, list[str]]:
    """The plot of a section, or "" and why it is missing: it shall not take the rest with it."""
    if not part.figure or not can_plot():
        return "", []
    try:
        return draw(part.figure), []
    except Exception as error:
        return "", [f"the plot could not be drawn ({type(error).__name__}: {error})"]


def _html_table(table: Table) -> str:
    rows = []
    if table.header:
        rows.append("<tr>" + "".join(f"<th>{_e(cell)}</th>" for cell in table.header) + "</tr>")
    for row in table.rows:
        rows.append("<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>")
    kind = "" if table.header else ' class="facts"'
    return f'<div class="wide"><table{kind}>' + "\n".join(rows) + "</table></div>"


def _e(text: str) -> str:
    return html.escape(NOT_XML.sub("?", text))
