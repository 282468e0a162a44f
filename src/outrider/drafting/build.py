"""From a speculative config to draft sources: everything about their names lives here.

The keys are vLLM's. A config is "auto", one object, a list of objects and sources, a source, or
None for plain decoding.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.checks import shown
from outrider.drafting.lookup import LookupSource
from outrider.drafting.options import CHECKS
from outrider.drafting.predicted import PredictedSource
from outrider.drafting.source import DraftSource
from outrider.drafting.table import TableSource
from outrider.errors import ConfigError, OutriderError
from outrider.tables.find import directories, find_table

if TYPE_CHECKING:
    from outrider.target.base import Target

Config = Mapping[str, Any]
SpeculativeConfig = str | Config | Sequence[Config | DraftSource] | DraftSource | None
# A draft model by name: the target to draft with, and its tokenizer.
LoadModel = Callable[[str], tuple["Target", object | None]]

RULE_KEY = "rejection_sample_method"
RULES = {
    "invariant": "invariant",
    "standard": "rejection",  # vLLM's name
    "rejection": "rejection",
    "block": "block",
}
# How vLLM loads and runs a draft model on its devices; accepted, and without effect here.
HARMLESS = {
    "draft_tensor_parallel_size": (None, 1),
    "enforce_eager": (None, False, True),
    "disable_padded_drafter_batch": (None, False, True),
    "quantization": (None,),
    "revision": (None,),
    "code_revision": (None,),
}
PLANNED = (
    *("eagle", "eagle3", "peagle", "mtp", "dflash", "dspark", "medusa", "pard", "span"),
    *("layerskip", "remote", "mlp_speculator", "ngram_gpu", "extract_hidden_states"),
)
SHARED_TOKENS_PER_REQUEST = 512  # vLLM counts cached requests, the store counts tokens


def split_rule(config: SpeculativeConfig) -> tuple[SpeculativeConfig, str]:
    """The config without the accept rule, and the rule: "invariant", "rejection" or "block".

    A config with nothing but a rule means the default sources under that rule.

    Raises:
        ConfigError: an unknown rule, or two different ones in a list.
    """
    if isinstance(config, Mapping):
        if RULE_KEY not in config:
            return config, "invariant"
        return _without_rule(config) or "auto", _rule(config[RULE_KEY])
    if config is None or isinstance(config, str | DraftSource) or not isinstance(config, Sequence):
        return config, "invariant"
    objects = [part for part in config if isinstance(part, Mapping)]
    rules = {_rule(part[RULE_KEY]) for part in objects if RULE_KEY in part}
    if len(rules) > 1:
        raise ConfigError(f"{RULE_KEY} is one for all sources, got {sorted(rules)}")
    parts = [_without_rule(part) if isinstance(part, Mapping) else part for part in config]
    kept = [part for part in parts if part != {}]
    rule = next(iter(rules), "invariant")
    return (kept if kept or not rules else "auto"), rule


def _without_rule(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != RULE_KEY}


def build_sources(
    config: SpeculativeConfig,
    load_model: LoadModel | None = None,
    rule: str | None = None,
    tokenizer: object | None = None,
) -> list[DraftSource]:
    """The sources a config asks for, in its order.

    Args:
        config: see the module.
        load_model: loads the draft model that a config names.
        rule: the accept rule, where `split_rule` has taken it out of the config already; a
            drafter that samples has to know it.
        tokenizer: of the target, to find a draft table made for it.

    Raises:
        ConfigError: an unknown method, key or value; the message names the known ones.
    """
    config, own_rule = split_rule(config)
    rule = own_rule if rule is None else _rule(rule)
    if config is None:
        return []
    if isinstance(config, str):
        if config != "auto":
            raise ConfigError(
                f'speculative_config must be "auto", an object, a list, a DraftSource or None, '
                f"got {shown(config)}"
            )
        return [LookupSource(), PredictedSource(), *_shipped_table(rule, tokenizer)]
    return [_build(part, load_model, rule, tokenizer) for part in _parts(config)]


def check_config(config: SpeculativeConfig) -> None:
    """Refuse what can be told from the config alone, before anything is loaded.

    Raises:
        ConfigError: as `build_sources`.
    """
    config, _ = split_rule(config)
    if config is None or isinstance(config, str):
        build_sources(config)
        return
    for part in _parts(config):
        method = _checked_method(part)
        if method in METHODS:
            _made(METHODS[method], part)  # costs nothing, and checks keys together


def _parts(config: Any) -> list[Any]:
    if isinstance(config, Mapping | DraftSource | type):
        return [config]
    if not isinstance(config, Sequence):
        raise ConfigError(f"speculative_config must be an object or a list, got {shown(config)}")
    return list(config)


@dataclass(frozen=True, slots=True)
class _Method:
    """What a method reads: keys to the arguments of `make`, and keys checked and not used."""

    make: Callable[..., DraftSource]
    keys: Mapping[str, str]  # config key -> argument
    accepted: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def own(self) -> list[str]:
        """Keys with an effect."""
        return ["method", *sorted(self.keys), RULE_KEY]

    @property
    def idle(self) -> list[str]:
        """Keys of vLLM that are accepted, and without effect."""
        return sorted({*self.accepted, *HARMLESS})


def _ngram(
    num_speculative_tokens: int = 16,
    prompt_lookup_min: int | None = None,
    prompt_lookup_max: int | None = None,
) -> LookupSource:
    """vLLM's n-gram lookup: nothing shorter than the minimum; here longer is always better."""
    low = prompt_lookup_min if prompt_lookup_min is not None else prompt_lookup_max
    low = 5 if low is None else low  # vLLM's default of both
    high = low if prompt_lookup_max is None else prompt_lookup_max
    if high < low:
        raise ConfigError(f"prompt_lookup_max must be at least prompt_lookup_min {low}, got {high}")
    return LookupSource(num_speculative_tokens, min_match=low)


def _suffix(
    num_speculative_tokens: int = 24,
    max_cached_requests: int = 10_000,
    min_token_prob: float = 0.1,
) -> LookupSource:
    """vLLM's suffix decoding with its defaults: outputs are shared between requests."""
    return LookupSource(
        num_speculative_tokens,
        min_survival=min_token_prob,
        shared_tokens=max_cached_requests * SHARED_TOKENS_PER_REQUEST,
    )


METHODS = {
    "ngram": _Method(
        _ngram,
        {key: key for key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")},
    ),
    "suffix": _Method(
        _suffix,
        {
            "num_speculative_tokens": "num_speculative_tokens",
            "suffix_decoding_max_cached_requests": "max_cached_requests",
            "suffix_decoding_min_token_prob": "min_token_prob",
        },
        # Depth and factor bound vLLM's tree search; the automaton has neither bound nor need.
        {"suffix_decoding_max_tree_depth": (), "suffix_decoding_max_spec_factor": ()},
    ),
    "lookup": _Method(
        LookupSource,
        {
            key: key
            for key in ("num_speculative_tokens", "min_match", "min_survival", "shared_tokens")
        },
    ),
    "predicted": _Method(PredictedSource, {"num_speculative_tokens": "num_speculative_tokens"}),
}
DRAFT_MODEL_KEYS = {"model": "model", "num_speculative_tokens": "num_speculative_tokens"}


TABLE_KEYS = {
    "path": "path",
    "model": "path",
    **{key: key for key in ("num_speculative_tokens", "branches", "min_survival", "hot_bytes")},
}


def _build(
    config: Any, load_model: LoadModel | None, rule: str, tokenizer: object | None
) -> DraftSource:
    method = _checked_method(config)
    if method is None:
        return config
    if ":" in method:
        return _custom(method, config)
    if method == "draft_model":
        return _draft_model(config, load_model, rule)
    if method == "table":
        return _table(config, rule, tokenizer)
    return _made(METHODS[method], config)


def _checked_method(config: Any) -> str | None:
    """The method of one part of a config, whose keys and values are what it reads.

    None: it is a source already.
    """
    if isinstance(config, DraftSource):
        return None
    if isinstance(config, type) and issubclass(config, DraftSource):
        raise ConfigError(
            f"a draft source must be an instance, got the class: write {config.__name__}(...)"
        )
    if not isinstance(config, Mapping):
        raise ConfigError(f"a source must be an object or a DraftSource, got {shown(config)}")
    method = config.get("method")
    if method is None and "model" in config:
        method = "draft_model"  # as vLLM reads a config that names only a model
    if not isinstance(method, str):
        raise ConfigError(
            f"speculative_config needs a method, one of {_methods()}, got {shown(method)}"
        )
    if method == "custom_class":
        raise ConfigError('a class of your own is named by "method": "package.module:Class"')
    if ":" in method:
        _imported(method)
    elif method == "draft_model":
        if not isinstance(config.get("model"), str):
            raise ConfigError(
                f'the method "draft_model" needs the key "model", a name or path, '
                f"got {shown(config.get('model'))}"
            )
        _check_keys(method, config, _Method(_not_made, DRAFT_MODEL_KEYS))
    elif method == "table":
        if "path" in config and "model" in config:
            raise ConfigError('a table is named by "path" or by "model", got both')
        _check_keys(method, config, _Method(_not_made, TABLE_KEYS))
    elif method in METHODS:
        _check_keys(method, config, METHODS[method])
    else:
        raise ConfigError(_unknown_method(method))
    return method


def _not_made(**options: Any) -> DraftSource:
    raise AssertionError(f"{options} of a method that is made elsewhere")


def _made(method: _Method, config: Config) -> DraftSource:
    arguments = {method.keys[key]: value for key, value in config.items() if key in method.keys}
    return method.make(**arguments)


def _draft_model(config: Config, load_model: LoadModel | None, rule: str) -> DraftSource:
    from outrider.drafting.draft_model import DraftModelSource  # imports the forward's parts

    def make(model: str, num_speculative_tokens: int = 4) -> DraftSource:
        if load_model is None:
            raise ConfigError(f"the draft model {model!r} cannot be loaded: no loader was given")
        target, tokenizer = load_model(model)
        return DraftModelSource(target, num_speculative_tokens, tokenizer=tokenizer, rule=rule)

    return _made(_Method(make, DRAFT_MODEL_KEYS), config)


def _table(config: Config, rule: str, tokenizer: object | None) -> DraftSource:
    """The table that is named, or else one found for the tokenizer."""

    def make(path: str | None = None, **options: Any) -> DraftSource:
        if rule == "block":  # it knows chains only
            options.setdefault("branches", 1)
        if path is not None:
            return TableSource(path, **options)
        fingerprint = getattr(tokenizer, "fingerprint", None)
        table = None if fingerprint is None else find_table(fingerprint)
        if table is None:
            raise ConfigError(
                f"no draft table for the tokenizer {fingerprint} in "
                f"{', '.join(map(str, directories()))}: name one with the key 'path', or make one "
                "with `outrider table build`"
            )
        return TableSource(table, **options)

    return _made(_Method(make, TABLE_KEYS), config)


def _shipped_table(rule: str, tokenizer: object | None) -> list[DraftSource]:
    fingerprint = getattr(tokenizer, "fingerprint", None)
    table = None if fingerprint is None else find_table(fingerprint)
    return [] if table is None else [TableSource(table, branches=1 if rule == "block" else 2)]


def _custom(path: str, config: Config) -> DraftSource:
    """An instance of "package.module:Class"; the other keys are its keyword arguments."""
    made = _imported(path)
    arguments = {key: value for key, value in config.items() if key not in ("method", RULE_KEY)}
    try:
        return made(**arguments)
    except OutriderError:
        raise
    except TypeError as error:
        raise ConfigError(f"{path!r} does not take {shown(sorted(arguments))}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{path!r} cannot be made with {shown(sorted(arguments))}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _imported(path: str) -> type[DraftSource]:
    module_name, _, class_name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(
            f"the draft source {path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(made, type) and issubclass(made, DraftSource)):
        raise ConfigError(
            f"{path!r} must be a subclass of outrider's DraftSource, got {shown(made)}"
        )
    return made


def _check_keys(name: str, config: Config, method: _Method) -> None:
    harmless = {**HARMLESS, **method.accepted}
    known = [*method.own, *method.idle]
    for key, value in config.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(
                f"unknown key {shown(key)} for the method {name!r}{hint} "
                f"Known keys: {', '.join(method.own)}; accepted without effect: "
                f"{', '.join(method.idle)}"
            )
        allowed = harmless.get(key, ())
        if allowed and value not in allowed:
            raise ConfigError(
                f"{key}={shown(value)} has no meaning for the method {name!r} here; "
                f"leave it out or give one of {list(allowed)}"
            )
        if key in CHECKS and key not in HARMLESS:
            CHECKS[key](key, value)


def _unknown_method(method: str) -> str:
    if method in PLANNED or method.endswith("_mtp"):
        return f"the method {method!r} is not available in this version; available: {_methods()}"
    near = difflib.get_close_matches(method, [*METHODS, "draft_model", "table"], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown method {method!r}{hint} Known methods: {_methods()}"


def _methods() -> str:
    return ", ".join([*METHODS, "draft_model", "table", '"package.module:Class"'])


def _rule(value: object) -> str:
    if not isinstance(value, str) or value not in RULES:
        raise ConfigError(f"{RULE_KEY} must be one of {', '.join(RULES)}, got {shown(value)}")
    return RULES[value]
