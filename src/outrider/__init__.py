"""outrider: the text of your model, several tokens per forward.

Names are imported when first used: `import outrider` alone loads neither torch nor a model.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.drafting.scripted import ScriptedSource
    from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome
    from outrider.errors import (
        ConfigError,
        KVFull,
        MissingDependency,
        ModelError,
        OutriderError,
        PromptError,
        SamplingError,
        SourceError,
        TableError,
        TokenizerMismatch,
        UserError,
    )
    from outrider.llm import LLM
    from outrider.results import (
        CompletionOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
        SourceMetrics,
        SpeculativeMetrics,
        StreamChunk,
    )
    from outrider.sampling_params import SamplingParams
    from outrider.terms import Terms

__version__ = "0.1.0"

_HOMES = {
    "outrider.llm": ("LLM",),
    "outrider.sampling_params": ("SamplingParams",),
    "outrider.terms": ("Terms",),
    "outrider.results": (
        *("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"),
        *("SourceMetrics", "SpeculativeMetrics", "StreamChunk"),
    ),
    "outrider.drafting.source": ("Draft", "DraftContext", "DraftSource", "Outcome"),
    "outrider.drafting.scripted": ("ScriptedSource",),
    "outrider.errors": (
        *("ConfigError", "KVFull", "MissingDependency", "ModelError", "OutriderError"),
        *("PromptError", "SamplingError", "SourceError", "TableError", "TokenizerMismatch"),
        "UserError",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "DraftContext",
    "DraftSource",
    "KVFull",
    "Logprob",
    "MissingDependency",
    "ModelError",
    "Outcome",
    "OutriderError",
    "PromptError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingError",
    "SamplingParams",
    "ScriptedSource",
    "SourceError",
    "SourceMetrics",
    "SpeculativeMetrics",
    "StreamChunk",
    "TableError",
    "Terms",
    "TokenizerMismatch",
    "UserError",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
