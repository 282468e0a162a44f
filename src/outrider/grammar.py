"""Output that follows a grammar: which tokens may come next, for every row of a draft.

The grammar is followed by llguidance (an optional package). A row's mask is that of its own
ancestors: the output, and above it the path through the draft, so that a draft never changes what
plain decoding would be allowed to say.

Shape legend: n rows of one request, V vocabulary, W = ceil(V / 32) words of a mask.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from outrider.checks import shown
from outrider.errors import MissingDependency, SamplingError
from outrider.grammar_trial import Dictionary, NotTried, Trial

KEPT = 64  # compiled grammars
NUM_ANEW = 3  # times that one output may have its grammar compiled anew …
ANEW_SECONDS = 0.3  # … between two steps of everybody's, if that takes no longer
# Models that have nothing to say write blanks for ever where a grammar lets them.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
# llguidance holds them as float64, and bounds of integers as int64, which it cuts them to.
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LARGEST_BOUND = 2**62
NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
DATA = ("const", "enum", "default", "examples")
TRIAL = Trial()
NONE_FITS = ("", "NoExtension", "NoExtensionBias")  # how llguidance says so


class Grammar(NamedTuple):
    """As llguidance reads it."""

    source: str
    may_name_tokens: bool  # as <|im_end|>, outside of its texts


class Compiled(NamedTuple):
    """A grammar at its beginning, to be copied."""

    matcher: Any
    is_slow: bool  # to compile


class Lost(NamedTuple):
    """A row whose mask cannot be told, and all behind it."""

    row: int
    why: str


class Grammars:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: with a `backend` of the library tokenizers.
        vocab_size: columns of the logits.
        eos_token_ids: what may end a text that is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._backend: Any = getattr(tokenizer, "backend", None)
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_token_ids)
        self._tokenizers: dict[bool, tuple[Any, Dictionary]] = {}  # by whether it names tokens
        self._known: dict[Grammar, Compiled] = {}
        self._refused: dict[Grammar, str] = {}  # why
        self._lock = Lock()  # submissions are checked in several threads

    def follow(self, structured_outputs: Mapping[str, Any]) -> "GrammarState":
        """The grammar at its beginning.

        Raises:
            SamplingError: it cannot be compiled, or this model cannot follow one.
            MissingDependency: llguidance is not installed.
        """
        library = _library()
        if self._backend is None or not self._eos_ids:
            raise SamplingError(
                "structured_outputs needs a tokenizer of the library tokenizers and a token that "
                "ends a text; this model was made without"
            )
        try:
            grammar = _grammar(library, structured_outputs)
        except SamplingError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise SamplingError(f"structured_outputs: {error}") from error
        with self._lock:
            if (found := self._known.pop(grammar, None)) is not None:
                self._known[grammar] = found  # the last one to go
            if (why := self._refused.get(grammar)) is not None:
                raise SamplingError(why)
        if found is None:
            found = self._compile(grammar)
        anew = partial(self._anew, grammar, found.is_slow)
        return GrammarState(found.matcher.deep_copy(), self._vocab_size, self._eos_ids, anew)

    def _anew(self, grammar: Grammar, is_slow: bool) -> Any:
        """A matcher that can do what a new one can: copies share what the library lets them do.

        Raises:
            SamplingError: it takes too long. The next submission has a new one.
        """
        with self._lock:
            self._known.pop(grammar, None)
        if is_slow:
            raise SamplingError("structured_outputs takes too long to be compiled anew")
        return self._compile(grammar, seconds=0.0).matcher.deep_copy()

    def _compile(self, grammar: Grammar, seconds: float | None = None) -> Compiled:
        """`seconds`: what it takes, where that is known; else it is tried elsewhere first."""
        try:
            matcher, took = self._matcher(grammar, False, seconds)
            if matcher.is_error() and grammar.may_name_tokens:
                matcher, took = self._matcher(grammar, True, seconds)
            if matcher.is_error() or next_tokens(matcher, self._vocab_size) is None:
                raise SamplingError(why_lost(matcher))
        except NotTried as error:
            raise SamplingError(f"structured_outputs cannot be followed: {error}") from None
        except SamplingError as error:
            why = f"structured_outputs cannot be followed: {error!s:.300}"
            with self._lock:
                _keep(self._refused, grammar, why)
            raise SamplingError(why) from None
        found = Compiled(matcher, took > ANEW_SECONDS)
        with self._lock:
            _keep(self._known, grammar, found)
        return found

    def _matcher(
        self, grammar: Grammar, names_tokens: bool, seconds: float | None
    ) -> tuple[Any, float]:
        """What llguidance makes of a text, with or without the names of special tokens.

        With them it takes a text that is such a name for the token, if the text is forced.
        """
        tokenizer, dictionary = self._tokenizer(names_tokens)
        took = TRIAL.seconds(dictionary, grammar.source) if seconds is None else seconds
        return _library().LLMatcher(tokenizer, grammar.source, log_level=0), took

    def _tokenizer(self, names_tokens: bool) -> tuple[Any, Dictionary]:
        with self._lock:
            if names_tokens not in self._tokenizers:
                told = self._backend.to_str()
                told, eos = told if names_tokens else _without_names(told), sorted(self._eos_ids)
                key = hashlib.sha256(f"{self._vocab_size} {eos} {told}".encode()).hexdigest()
                made = _library().LLTokenizer(told, n_vocab=self._vocab_size, eos_token=eos)
                dictionary = Dictionary(key, told, self._vocab_size, eos)
                self._tokenizers[names_tokens] = made, dictionary
            return self._tokenizers[names_tokens]


class GrammarState:
    """Where one output is in its grammar.

    Args:
        anew: makes a matcher at the beginning of the grammar, for when this one gives up: drafts
            and other outputs may have spent what the library allows, which plain decoding would
            not have. From then on the output goes without drafts.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        anew: Callable[[], Any],
    ) -> None:
        self._matcher = matcher
        self._anew = anew
        self._num_anew = 0
        self._anew_at = -1  # tokens of the output when that was last tried
        self._vocab_size = vocab_size
        self._eos_ids = eos_token_ids
        self._num_output = 0  # tokens of the output that the matcher has read
        self._branch: Any = None  # a copy of it that has read a draft too, as far as …
        self._path: list[int] = []  # … this
        self.lost: Lost | None = None  # of the rows that were last masked

    def another(self) -> "GrammarState":
        """One more output at the beginning of the grammar, where this one is."""
        assert self._num_output == 0
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self._eos_ids, self._anew)

    def mask_rows(
        self,
        logits: np.ndarray,
        output_ids: np.ndarray,
        draft_ids: Sequence[int],
        parents: Sequence[int],
    ) -> None:
        """Rule out in float32 logits [n, V] what may not come next, in place.

        Row 0 follows the output, row 1 + i draft token i. Rows below a token that the grammar
        forbids, or below an end, are left alone: no output gets there. So are those from `lost`
        on: nothing may be chosen by them.
        """
        self.lost = None
        if not self._read(output_ids):
            self.lost = Lost(0, "the library took back a token that it had let in")
            return
        for row, path in enumerate([[], *_paths(draft_ids, parents)]):
            matcher, is_there = self._follow(path)
            if is_there:
                allowed = next_tokens(matcher, self._vocab_size)
                if allowed is None and not path and self._begin_anew(output_ids):
                    matcher = self._matcher
                    allowed = next_tokens(matcher, self._vocab_size)
                if allowed is not None:
                    logits[row, ~allowed] = -np.inf
                    continue
            elif not matcher.is_error():
                continue
            self.lost = Lost(row, why_lost(matcher))
            return

    def lawful(
        self, output_ids: np.ndarray, draft_ids: Sequence[int], parents: Sequence[int]
    ) -> list[int]:
        """Indices of the draft tokens that may follow the output and their ancestors."""
        if not self._read(output_ids):
            return list(range(len(draft_ids)))
        if self._num_anew:
            return []
        paths = _paths(draft_ids, parents)
        return [index for index, path in enumerate(paths) if self._allows(path)]

    def _allows(self, path: list[int]) -> bool:
        *before, last = path
        if last in self._eos_ids:
            matcher, is_there = self._follow(before)
            return is_there and matcher.is_accepting()
        return self._follow(path)[1]

    def forced(self, output_ids: np.ndarray, most: int) -> list[int]:
        """Tokens that the grammar leaves no choice about after the output, at most so many."""
        if not self._read(output_ids) or self._num_anew:
            return []
        return self._matcher.compute_ff_tokens()[:most]

    def _read(self, output_ids: np.ndarray) -> bool:
        """Bring the matcher to the end of the output; False where that has left the grammar."""
        self._branch = None
        self._take(output_ids)
        if self._matcher.is_error():
            self._begin_anew(output_ids)
        return self._num_output == len(output_ids) or self._matcher.is_error()

    def _begin_anew(self, output_ids: np.ndarray) -> bool:
        if self._num_anew == NUM_ANEW or self._anew_at == len(output_ids):
            return False
        self._num_anew += 1
        self._anew_at = len(output_ids)
        with suppress(SamplingError):
            self._matcher, self._num_output = self._anew(), 0
            self._take(output_ids)
            return True
        return False

    def _take(self, output_ids: np.ndarray) -> None:
        new = output_ids[self._num_output :].tolist()
        self._num_output += self._matcher.try_consume_tokens(new) if new else 0

    def _follow(self, path: list[int]) -> tuple[Any, bool]:
        """A matcher behind the output and this path, and whether the grammar lets it get there.

        Matchers go forward only: behind a rollback llguidance (1.5.1 to 1.9.1) may tell the mask of
        a place where the matcher has been before.
        """
        if not path:
            return self._matcher, True
        branch = self._branch
        if branch is None or branch.is_error() or path[: len(self._path)] != self._path:
            branch = self._branch = self._matcher.deep_copy()
            self._path = []
        known = len(self._path)
        rest = path[known:]
        if any(token in self._eos_ids or not 0 <= token < self._vocab_size for token in rest):
            return branch, False
        read = branch.try_consume_tokens(rest) if rest else 0
        self._path = path[: known + read]
        return branch, len(self._path) == len(path)


def _keep(kept: dict[Grammar, Any], grammar: Grammar, value: Any) -> None:
    kept[grammar] = value
    if len(kept) > KEPT:
        kept.pop(next(iter(kept)))


def next_tokens(matcher: Any, vocab_size: int) -> np.ndarray | None:
    """Tokens that may come next, bool [V]; None where the library cannot tell, or there is none."""
    mask = np.empty(-(-vocab_size // 32), np.int32)  # [W]
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].view(np.bool_)
    return None if matcher.is_error() or not allowed.any() else allowed


def why_lost(matcher: Any) -> str:
    """What the library says, without the state of the matcher and the grammar that it quotes."""
    lines = matcher.get_error().split("\n<state>")[0].splitlines()
    reason = " ".join(line for line in lines if not line.startswith(" "))
    return reason if reason not in NONE_FITS else "no token of the model fits"


def _paths(draft_ids: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Each draft token with its ancestors before it."""
    paths: list[list[int]] = []
    for index, token in enumerate(draft_ids):
        parent = parents[index] if parents else index - 1
        paths.append([*(paths[parent] if parent >= 0 else ()), token])
    return paths


def _without_names(tokenizer: str) -> str:
    """A tokenizer.json whose special tokens are called as no text can be."""
    told = json.loads(tokenizer)
    names = {
        token["content"]: f"\ufdd0{token['id']}"
        for token in told.get("added_tokens") or ()
        if token["special"]
    }
    for token in told.get("added_tokens") or ():
        token["content"] = names.get(token["content"], token["content"])
    vocab = told["model"].get("vocab")
    if isinstance(vocab, dict):
        told["model"]["vocab"] = {names.get(text, text): index for text, index in vocab.items()}
    elif vocab is not None:
        told["model"]["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    unknown = told["model"].get("unk_token")
    told["model"] |= {} if unknown is None else {"unk_token": names.get(unknown, unknown)}
    told["post_processor"] = None
    return json.dumps(told, ensure_ascii=False)


def _grammar(library: Any, structured_outputs: Mapping[str, Any]) -> Grammar:
    [(kind, value)] = structured_outputs.items()
    make = library.LLMatcher
    if kind == "json_object":
        kind, value = "json", {"type": "object"}
    if kind == "json":
        schema = json.dumps(checked_schema(value))
        return Grammar(make.grammar_from_json_schema(schema, defaults=JSON_OPTIONS), False)
    if kind == "regex":
        return Grammar(make.grammar_from_regex(value), False)
    if kind == "choice":
        return Grammar(make.grammar_from_lark(f"start: CHOICE\n{choice_rule(value)}"), False)
    return Grammar(make.grammar_from_lark(value), True)


def choice_rule(texts: Iterable[str]) -> str:
    """A terminal CHOICE in Lark's notation: one, as a state has no room for thousands of rules."""
    ways = dict.fromkeys(json.dumps(text, ensure_ascii=False) for text in texts)
    return f"CHOICE: {' | '.join(ways)}\n"


def checked_schema(given: Any) -> dict[str, Any]:
    """A JSON schema as an object, from that or from its text.

    Raises:
        SamplingError: it is none, or llguidance would read something else in it.
    """
    try:
        schema = json.loads(given if isinstance(given, str) else json.dumps(given))
    except (ValueError, RecursionError, TypeError) as error:
        raise SamplingError(f"structured_outputs.json is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise SamplingError(f"structured_outputs.json must be an object, got {shown(schema)}")
    if not isinstance(schema.get("x-guidance", {}), Mapping):
        options = shown(schema["x-guidance"])
        raise SamplingError(f"structured_outputs: x-guidance must be an object, got {options}")
    left: list[Any] = [schema]
    while left:
        one = left.pop()
        if isinstance(one, Sequence) and not isinstance(one, str):
            left += one
        elif isinstance(one, Mapping):
            for name, value in one.items():
                if name in BOUNDS:
                    _check_bound(name, value)
                if name in NAMED_SCHEMAS and isinstance(value, Mapping):
                    left += value.values()
                elif name not in DATA:
                    left.append(value)
    return schema


def _check_bound(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (abs(value) > LARGEST_BOUND or float(value) != value):
        raise SamplingError(
            f"structured_outputs: {name} must be a number of 64 bits (floating point) in "
            f"[-2^62, 2^62], got {shown(value)}"
        )


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "structured_outputs needs llguidance: pip install 'outrider[serve]'"
        ) from error
    return llguidance
