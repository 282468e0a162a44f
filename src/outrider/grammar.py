"""Output that follows a grammar: which tokens may come next, for every row of a draft.

The grammar is followed by llguidance (an optional package). A row's mask is that of its own
ancestors: the output, and above it the path through the draft, so that a draft never changes what
plain decoding would be allowed to say.

Shape legend: n rows of one request, V vocabulary, W = ceil(V / 32) words of a mask.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from outrider.errors import MissingDependency, SamplingError

logger = logging.getLogger(__name__)

KEPT = 64  # compiled grammars
# Models that have nothing to say write blanks for ever where a grammar lets them.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}


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
        self._eos_ids = tuple(eos_token_ids)
        self._tokenizers: dict[bool, Any] = {}  # by whether a grammar can name special tokens
        self._known: dict[str, Any] = {}  # matchers at their beginning, by grammar
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
        with self._lock:
            matcher = self._matcher(library, structured_outputs).deep_copy()
        return GrammarState(matcher, self._vocab_size, self._eos_ids)

    def _matcher(self, library: Any, structured_outputs: Mapping[str, Any]) -> Any:
        try:
            source = _source(library, structured_outputs)
        except (TypeError, ValueError, RecursionError) as error:
            raise SamplingError(f"structured_outputs: {error}") from error
        if source in self._known:
            return self._known[source]
        tokenizer = self._tokenizer(library, names_tokens="grammar" in structured_outputs)
        matcher = library.LLMatcher(tokenizer, source, log_level=0)
        if matcher.is_error():
            lines = matcher.get_error().splitlines()  # those that quote the grammar are indented
            reason = " ".join(line for line in lines if not line.startswith(" "))
            raise SamplingError(f"structured_outputs cannot be followed: {reason:.300}")
        if len(self._known) >= KEPT:
            self._known.pop(next(iter(self._known)))
        self._known[source] = matcher
        return matcher

    def _tokenizer(self, library: Any, names_tokens: bool) -> Any:
        """The tokenizer as llguidance reads it.

        It looks for special tokens in what a grammar forces. In a text they are none: a choice that
        says "<|im_start|>" is spelled in letters. Grammars in Lark's notation can name them.
        """
        if names_tokens not in self._tokenizers:
            told = self._backend.to_str()
            self._tokenizers[names_tokens] = library.LLTokenizer(
                told if names_tokens else _without_names(told),
                n_vocab=self._vocab_size,
                eos_token=list(self._eos_ids),
            )
        return self._tokenizers[names_tokens]


class GrammarState:
    """Where one output is in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_token_ids)
        self._mask = np.empty(-(-vocab_size // 32), np.int32)  # [W]
        self._num_output = 0  # tokens of the output that the matcher has read …
        self._path: list[int] = []  # … and those of a draft behind them

    def mask_rows(
        self,
        logits: np.ndarray,
        output_ids: np.ndarray,
        draft_ids: Sequence[int],
        parents: Sequence[int],
    ) -> None:
        """Rule out in float32 logits [n, V] what may not come next, in place.

        Row 0 follows the output, row 1 + i draft token i. Rows below a token that the grammar
        forbids, or below an end, are left alone: no output gets there.
        """
        if not self._read(output_ids):
            return
        for row, path in enumerate([[], *_paths(draft_ids, parents)]):
            if self._go(path):
                logits[row, ~self._allowed()] = -np.inf

    def lawful(
        self, output_ids: np.ndarray, draft_ids: Sequence[int], parents: Sequence[int]
    ) -> list[int]:
        """Indices of the draft tokens that may follow the output and their ancestors."""
        if not self._read(output_ids):
            return list(range(len(draft_ids)))
        paths = _paths(draft_ids, parents)
        return [index for index, path in enumerate(paths) if self._allows(path)]

    def _allows(self, path: list[int]) -> bool:
        *before, last = path
        if last in self._eos_ids:
            return self._go(before) and self._matcher.is_accepting()
        return self._go(path)

    def forced(self, output_ids: np.ndarray, most: int) -> list[int]:
        """Tokens that the grammar leaves no choice about after the output, at most so many."""
        if not self._read(output_ids):
            return []
        return self._matcher.compute_ff_tokens()[:most]

    def _read(self, output_ids: np.ndarray) -> bool:
        """Bring the matcher to the end of the output; False where that has left the grammar."""
        self._go([])
        new = output_ids[self._num_output :].tolist()
        self._num_output += self._matcher.try_consume_tokens(new) if new else 0
        return self._num_output == len(output_ids)

    def _go(self, path: list[int]) -> bool:
        """Move from the last path to this one; False where the grammar does not let it."""
        known = 0
        for old, new in zip(self._path, path, strict=False):
            if old != new:
                break
            known += 1
        if len(self._path) > known:
            self._matcher.rollback(len(self._path) - known)
        rest = path[known:]
        if any(token in self._eos_ids or not 0 <= token < self._vocab_size for token in rest):
            rest = []
        read = self._matcher.try_consume_tokens(rest) if rest else 0
        self._path = path[: known + read]
        return len(self._path) == len(path)

    def _allowed(self) -> np.ndarray:
        """Tokens that may come next, bool [V]."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        allowed = bits[: self._vocab_size].view(np.bool_)
        if self._matcher.is_error() or not allowed.any():  # a limit of the library was reached
            reason = self._matcher.get_error() or self._matcher.stop_reason()
            logger.warning("a grammar was given up: %s", reason.splitlines()[0])
            allowed[list(self._eos_ids)] = True
        return allowed


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


def _source(library: Any, structured_outputs: Mapping[str, Any]) -> str:
    """The grammar as llguidance reads it."""
    [(kind, value)] = structured_outputs.items()
    make = library.LLMatcher
    if kind == "json_object":
        kind, value = "json", {"type": "object"}
    if kind == "json":
        schema = value if isinstance(value, str) else json.dumps(value)
        return make.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
    if kind == "regex":
        return make.grammar_from_regex(value)
    if kind == "choice":
        value = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    return make.grammar_from_lark(value)


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "structured_outputs needs llguidance: pip install 'outrider[serve]'"
        ) from error
    return llguidance
