"""Models that transformers reads, whole or not at all: what it misses it makes up at random."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_pretrained(name: str, path: str, dtype: torch.dtype, **options: Any) -> "PreTrainedModel":
    """A causal language model with every weight of its configuration.

    Args:
        name: what to call it in errors.
        options: more of what `from_pretrained` takes.

    Raises:
        ModelError: it cannot be read, or a weight is missing or of another shape.
    """
    from transformers import AutoModelForCausalLM

    options |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with no_progress_bars():
            read: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    except (ValueError, OSError, LookupError, TypeError, RuntimeError, ImportError) as error:
        raise ModelError(f"cannot load {name}: {error}") from error
    model, found = read
    for key, got, expected in sorted(found["mismatched_keys"]):
        raise ModelError(
            f"the weights of {name} must hold {key} of the shape {tuple(expected)}, "
            f"got {tuple(got)}"
        )
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
        raise ModelError(f"the weights of {name} lack {', '.join(missing[:2])}{more}")
    return model


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep the progress bars of transformers off the screen for a moment."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
