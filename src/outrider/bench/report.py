"""Reports of a bench: one HTML file with its plots inside, or Markdown with plots beside it."""

import html
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.bench.plots import can_plot, figure
from outrider.bench.provenance import write_whole
from outrider.bench.sections import Section, Table, headline, plain_text, sections
from outrider.bench.study import Study

TITLE = "outrider bench"
STYLE = """
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
       color: #24292f; background: #fff; max-width: 64rem; margin: 2rem auto; padding: 0 1.5rem; }
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
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; margin: .4rem 0; }
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
        if part.figure and can_plot():
            body.append(draw(part.figure))
        if part.table is not None:
            body.append(_html_table(part.table))
        if part.details:
            body.append("<ul>" + "".join(f"<li>{_e(line)}</li>" for line in part.details) + "</ul>")
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
        if part.figure and can_plot():
            picture = path.with_name(f"{path.stem}-{part.figure}.svg")
            header = '<?xml version="1.0" encoding="utf-8"?>\n'
            write_whole(picture, header + draw(part.figure))
            lines += [f"![{part.title}]({picture.name})", ""]
        if part.table is not None:
            lines += [*plain_text(part.table), ""]
        if part.details:
            lines += [*(f"- {line}" for line in part.details), ""]
    write_whole(path, "\n".join(lines))


def _html_table(table: Table) -> str:
    rows = []
    if table.header:
        rows.append("<tr>" + "".join(f"<th>{_e(cell)}</th>" for cell in table.header) + "</tr>")
    for row in table.rows:
        rows.append("<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>")
    kind = "" if table.header else ' class="facts"'
    return f'<div class="wide"><table{kind}>' + "\n".join(rows) + "</table></div>"


def _e(text: str) -> str:
    return html.escape(text)
