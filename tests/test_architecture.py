"""The file list of docs/architecture.md is the tree."""

import re
from pathlib import Path

REPO = Path(__file__).parent.parent
SOURCE = REPO / "src/outrider"
BY_FOLDER = {"cli"}  # named as a whole


def named_files() -> dict[str, set[str]]:
    """By package ("" is outrider itself), the Python files that the page names."""
    page = (REPO / "docs/architecture.md").read_text()
    block = page.partition("    src/outrider/\n")[2].partition("    tests/")[0]
    found: dict[str, set[str]] = {"": set()}
    package = ""
    for line in block.splitlines():
        if line[6] != " ":
            folder = re.match(r" {6}(\w+)/", line)
            package = folder[1] if folder else ""
        found.setdefault(package, set()).update(re.findall(r"\b(\w+\.py)\b", line))
    return found


def test_the_page_names_every_file_and_no_other() -> None:
    named = named_files()
    packages = {path.parent.name for path in SOURCE.glob("*/*.py")} - BY_FOLDER
    assert packages <= set(named)
    for package in ("", *sorted(packages)):
        files = {path.name for path in (SOURCE / package).glob("*.py")}
        assert named[package] - {"__init__.py"} == files - {"__init__.py"}, package
    assert all((SOURCE / package).is_dir() for package in named)
