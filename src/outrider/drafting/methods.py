"""Every method a speculative config can name: its keys, and how it is made.

Methods and keys are vLLM's where vLLM has them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.checkpoints.find import find_drafters
from outrider.drafting.forced import ForcedSource
from outrider.drafting.lookup import LookupSource
from outrider.drafting.predicted import PredictedSource
from outrider.drafting.source import DraftSource
from outrider.drafting.table import TableSource
from outrider.errors import ConfigError, DataError
from outrider.tables.find import directories, find_table

if TYPE_CHECKING:
    from outrider.target.base import Target

# A draft model by name: the target to draft with, and its tokenizer.
LoadModel = Callable[[str], tuple["Target", object | None]]

log = logging.getLogger("outrider")
SHARED_TOKENS_PER_REQUEST = 512  # vLLM counts cached requests, the store counts tokens


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a source may need to know besides its own keys."""

    load_model: LoadModel | None = None
    rule: str = "invariant"  # a drafter that samples has to know the accept rule
    tokenizer: object | None = None  # of the target
    target: "Target | None" = None

    @property
    def sizes(self) -> dict[str, int]:
        """What tells targets of one tokenizer apart, as drafters name it."""
        names = ("vocab_size", "hidden_size", "num_layers")
        return {} if self.target is None else {n: getattr(self.target, n) for n in names}

    @property
    def shown(self) -> str:
        sizes = "".join(f", {name}={value}" for name, value in self.sizes.items())
        return f"the target (tokenizer {self.fingerprint}{sizes})"

    @property
    def fingerprint(self) -> str | None:
        return getattr(self.tokenizer, "fingerprint", None)


@dataclass(frozen=True, slots=True)
class Method:
    """What a method reads: keys to the arguments of `make`, and keys checked and not used."""

    make: Callable[..., DraftSource]  # (surroundings, **arguments)
    keys: Mapping[str, str]  # config key -> argument
    accepted: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    needs: str = ""  # a key that has to be there
    loads: bool = False  # making it reads files


def _ngram(
    _: Surroundings,
    num_speculative_tokens: int = 16,
    prompt_lookup_min: int | None = None,
    prompt_lookup_max: int | None = None,
) -> DraftSource:
    """vLLM's n-gram lookup: nothing shorter than the minimum; here longer is always better."""
    low = prompt_lookup_min if prompt_lookup_min is not None else prompt_lookup_max
    low = 5 if low is None else low  # vLLM's default of both
    high = low if prompt_lookup_max is None else prompt_lookup_max
    if high < low:
        raise ConfigError(f"prompt_lookup_max must be at least prompt_lookup_min {low}, got {high}")
    return LookupSource(num_speculative_tokens, min_match=low)


def _suffix(
    _: Surroundings,
    num_speculative_tokens: int = 24,
    max_cached_requests: int = 10_000,
    min_token_prob: float = 0.1,
) -> DraftSource:
    """vLLM's suffix decoding with its defaults: outputs are shared between requests."""
    return LookupSource(
        num_speculative_tokens,
        min_survival=min_token_prob,
        shared_tokens=max_cached_requests * SHARED_TOKENS_PER_REQUEST,
    )


def _lookup(_: Surroundings, **options: Any) -> DraftSource:
    return LookupSource(**options)


def _predicted(_: Surroundings, **options: Any) -> DraftSource:
    return PredictedSource(**options)


def _forced(_: Surroundings) -> DraftSource:
    return ForcedSource()


def _table(around: Surroundings, path: str | None = None, **options: Any) -> DraftSource:
    """The table that is named, or else one found for the tokenizer."""
    if around.rule == "block":  # it knows chains only
        options.setdefault("branches", 1)
    if path is not None:
        return TableSource(path, **options)
    fingerprint = around.fingerprint
    table = None if fingerprint is None else find_table(fingerprint)
    if table is None:
        raise ConfigError(
            f"no draft table for the tokenizer {fingerprint} in "
            f"{', '.join(map(str, directories()))}: name one with the key 'path', or make one "
            "with `outrider table build`"
        )
    return TableSource(table, **options)


def _draft_model(around: Surroundings, model: str, num_speculative_tokens: int = 4) -> DraftSource:
    from outrider.drafting.draft_model import DraftModelSource  # imports the forward's parts

    if around.load_model is None:
        raise ConfigError(f"the draft model {model!r} cannot be loaded: no loader was given")
    target, tokenizer = around.load_model(model)
    return DraftModelSource(target, num_speculative_tokens, tokenizer=tokenizer, rule=around.rule)


def _trained(algorithm: str) -> Callable[..., DraftSource]:
    """Makes the drafter that is named, or else one that ships for the target's tokenizer."""

    def make(
        around: Surroundings,
        model: str | Path | None = None,
        num_speculative_tokens: int | None = None,
        parallel_drafting: bool = False,
    ) -> DraftSource:
        from outrider.checkpoints import load_drafter
        from outrider.drafting.neural import NeuralSource

        # vLLM calls P-EAGLE an EAGLE-3 that drafts in parallel.
        wanted = "peagle" if algorithm == "eagle3" and parallel_drafting else algorithm
        path = model or find_drafters(around.fingerprint, around.sizes).get(wanted)
        if path is None:
            raise ConfigError(
                f"no {wanted} drafter ships for {around.shown}: name one with the key 'model', or "
                "train one with `outrider train`"
            )
        drafter = load_drafter(path).drafter
        found = drafter.config.algorithm
        if found != wanted:
            raise ConfigError(f"{path} is a drafter of the method {found!r}, not {wanted!r}")
        return NeuralSource(drafter, num_speculative_tokens, rule=around.rule)

    return make


TRAINED = ("dspark", "eagle3", "dflash", "peagle", "mtp", "medusa", "pard")  # best first


def trained_drafter(around: Surroundings) -> DraftSource | None:
    """The best of the drafters that ship for the target's tokenizer, or were put in the cache."""
    found = find_drafters(around.fingerprint, around.sizes)
    for name in [name for name in TRAINED if name in found]:
        try:
            return METHODS[name].make(around, model=found[name])
        except DataError as error:
            log.warning("%s", error)
    return None


TRAINED_KEYS = {"model": "model", "num_speculative_tokens": "num_speculative_tokens"}
METHODS = {
    "ngram": Method(
        _ngram,
        {key: key for key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")},
    ),
    "suffix": Method(
        _suffix,
        {
            "num_speculative_tokens": "num_speculative_tokens",
            "suffix_decoding_max_cached_requests": "max_cached_requests",
            "suffix_decoding_min_token_prob": "min_token_prob",
        },
        # Depth and factor bound vLLM's tree search; the automaton has neither bound nor need.
        {"suffix_decoding_max_tree_depth": (), "suffix_decoding_max_spec_factor": ()},
    ),
    "lookup": Method(
        _lookup,
        {
            key: key
            for key in ("num_speculative_tokens", "min_match", "min_survival", "shared_tokens")
        },
    ),
    "predicted": Method(_predicted, {"num_speculative_tokens": "num_speculative_tokens"}),
    "forced": Method(_forced, {}),
    "table": Method(
        _table,
        {
            "path": "path",
            "model": "path",
            **{
                key: key
                for key in ("num_speculative_tokens", "branches", "min_survival", "hot_bytes")
            },
        },
        loads=True,
    ),
    "draft_model": Method(
        _draft_model,
        {"model": "model", "num_speculative_tokens": "num_speculative_tokens"},
        needs="model",
        loads=True,
    ),
    **{
        name: Method(
            _trained(name),
            {**TRAINED_KEYS, "parallel_drafting": "parallel_drafting"}
            if name == "eagle3"
            else TRAINED_KEYS,
            # All of these draft in parallel; vLLM may say so.
            {} if name in ("eagle3", "mtp") else {"parallel_drafting": (True,)},
            loads=True,
        )
        for name in TRAINED
    },
}
