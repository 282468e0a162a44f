"""Drafters that ship, or wait in the cache, for a target."""

import logging
from collections.abc import Mapping
from pathlib import Path

import outrider
from outrider.cache import cache_dir
from outrider.checkpoints import is_drafter, load_drafter
from outrider.checkpoints.files import read_config
from outrider.errors import DataError

log = logging.getLogger("outrider")


def find_drafters(fingerprint: str | None, sizes: Mapping[str, int]) -> dict[str, Path]:
    """By algorithm the first drafter made for a target of this tokenizer and these sizes.

    Models of one family share a tokenizer, so that it alone tells no target.
    """
    found: dict[str, Path] = {}
    if fingerprint is None:
        return found
    wanted = {"fingerprint": fingerprint, **sizes}
    for directory in (cache_dir("drafters"), Path(outrider.__file__).parent / "pretrained"):
        for path in sorted(directory.glob("*/config.json")):
            try:
                config = read_config(path.parent)
            except DataError as error:
                log.warning("%s", error)
                continue
            target, shape = config.get("target"), config.get("drafter")
            if not isinstance(target, dict) or not isinstance(shape, dict):
                continue  # of another format, or damaged
            algorithm = shape.get("algorithm")
            if isinstance(algorithm, str) and wanted.items() <= target.items():
                found.setdefault(algorithm, path.parent)
    return found


def algorithm_at(path: object) -> str | None:
    """The algorithm of the drafter in a directory; None: it holds another model, or nothing.

    Raises:
        DataError: it is a drafter, and damaged.
    """
    if not isinstance(path, str | Path) or not (Path(path) / "config.json").is_file():
        return None
    config = read_config(Path(path))
    shape = config.get("drafter")
    if isinstance(shape, dict) and isinstance(shape.get("algorithm"), str):
        return shape["algorithm"]  # our own format says it
    return load_drafter(path).drafter.config.algorithm if is_drafter(config) else None
