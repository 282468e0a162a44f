"""From a speculative config to draft sources; methods.py knows what each of them reads.

The keys are vLLM's. A config is "auto", one object, a list of these and of sources, a source, or
None for plain decoding.
"""

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outrider.checkpoints.find import algorithm_at
from outrider.checks import shown
from outrider.drafting.forced import ForcedSource
from outrider.drafting.lookup import LookupSource
from outrider.drafting.methods import METHODS, LoadModel, Method, Surroundings, trained_drafter
from outrider.drafting.options import CHECKS
from outrider.drafting.predicted import PredictedSource
from outrider.drafting.source import DraftSource
from outrider.drafting.table import TableSource
from outrider.errors import ConfigError, OutriderError
from outrider.tables.find import find_table

if TYPE_CHECKING:
    from outrider.target.base import Target

Config = Mapping[str, Any]
SpeculativeConfig = str | Config | Sequence[str | Config | DraftSource] | DraftSource | None

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
    *("eagle", "span", "layerskip", "remote", "mlp_speculator", "ngram_gpu"),
    "extract_hidden_states",
)


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
    target: "Target | None" = None,
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
    around = Surroundings(load_model, rule, tokenizer, target)
    if config is None:
        return []
    if isinstance(config, str):
        if config != "auto":
            raise ConfigError(
                f'speculative_config must be "auto", an object, a list, a DraftSource or None, '
                f"got {shown(config)}"
            )
        return _default(around)
    sources: list[DraftSource] = []
    for part in _parts(config):
        sources += _default(around) if part == "auto" else [_build(part, around)]
    return sources


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
        if method in METHODS and not METHODS[method].loads:
            _made(METHODS[method], part, Surroundings())  # costs nothing, checks keys together


def _parts(config: Any) -> list[Any]:
    if isinstance(config, Mapping | DraftSource | type):
        config = [config]
    if not isinstance(config, Sequence):
        raise ConfigError(f"speculative_config must be an object or a list, got {shown(config)}")
    return ["auto" if part == {"method": "auto"} else part for part in config]


def _build(config: Any, around: Surroundings) -> DraftSource:
    method = _checked_method(config)
    if method is None:
        return config
    if ":" in method:
        return _custom(method, config)
    return _made(METHODS[method], config, around)


def _checked_method(config: Any) -> str | None:
    """The method of one part of a config, whose keys and values are what it reads.

    None: it is a source already, or the default ones.
    """
    if isinstance(config, DraftSource) or config == "auto":
        return None
    if isinstance(config, type) and issubclass(config, DraftSource):
        raise ConfigError(
            f"a draft source must be an instance, got the class: write {config.__name__}(...)"
        )
    if not isinstance(config, Mapping):
        raise ConfigError(f"a source must be an object or a DraftSource, got {shown(config)}")
    method = config.get("method")
    if method is None and "model" in config:  # as vLLM reads a config that names only a model
        method = algorithm_at(config["model"]) or "draft_model"
    if not isinstance(method, str):
        raise ConfigError(
            f"speculative_config needs a method, one of {_methods()}, got {shown(method)}"
        )
    if method == "custom_class":
        raise ConfigError('a class of your own is named by "method": "package.module:Class"')
    if ":" in method:
        _imported(method)
    elif method in METHODS:
        _check_needs(method, config, METHODS[method])
        _check_keys(method, config, METHODS[method])
    else:
        raise ConfigError(_unknown_method(method))
    return method


def _made(method: Method, config: Config, around: Surroundings) -> DraftSource:
    arguments = {method.keys[key]: value for key, value in config.items() if key in method.keys}
    return method.make(around, **arguments)


def _check_needs(name: str, config: Config, method: Method) -> None:
    if method.needs and not isinstance(config.get(method.needs), str):
        raise ConfigError(
            f'the method "{name}" needs the key "{method.needs}", a name or path, '
            f"got {shown(config.get(method.needs))}"
        )
    arguments = list(method.keys.values())
    both = [key for key in config if arguments.count(method.keys.get(key, "")) > 1]
    if len(both) > 1:
        named = " or by ".join(f'"{key}"' for key in sorted(both, reverse=True))
        raise ConfigError(f"a {name} is named by {named}, got both")


def _default(around: Surroundings) -> list[DraftSource]:
    """What "auto" means: all that costs next to nothing, and a trained drafter made for the target.

    The planner asks the drafter where it pays.
    """
    sources: list[DraftSource] = [LookupSource(), PredictedSource(), ForcedSource()]
    table = None if around.fingerprint is None else find_table(around.fingerprint)
    if table is not None:
        sources.append(TableSource(table, branches=1 if around.rule == "block" else 2))
    drafter = trained_drafter(around)
    if drafter is not None:
        sources.append(drafter)
    return sources


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


def _check_keys(name: str, config: Config, method: Method) -> None:
    harmless = {**HARMLESS, **method.accepted}
    own = ["method", *sorted(method.keys), RULE_KEY]  # with an effect
    idle = sorted({*method.accepted, *HARMLESS})
    known = [*own, *idle]
    for key, value in config.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(
                f"unknown key {shown(key)} for the method {name!r}{hint} "
                f"Known keys: {', '.join(own)}; accepted without effect: "
                f"{', '.join(idle)}"
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
    if method == "auto":
        return 'the method "auto" takes no keys: for more sources give a list, as ["auto", {…}]'
    if method in PLANNED or method.endswith("_mtp"):
        return f"the method {method!r} is not available in this version; available: {_methods()}"
    near = difflib.get_close_matches(method, METHODS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown method {method!r}{hint} Known methods: {_methods()}"


def _methods() -> str:
    return ", ".join([*METHODS, '"package.module:Class"'])


def _rule(value: object) -> str:
    if not isinstance(value, str) or value not in RULES:
        raise ConfigError(f"{RULE_KEY} must be one of {', '.join(RULES)}, got {shown(value)}")
    return RULES[value]
