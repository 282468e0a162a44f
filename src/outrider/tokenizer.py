"""What the engine needs of a tokenizer, without importing transformers (0.7 s at start)."""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from outrider.errors import ModelError, PromptError
from outrider.text import check_unicode

if TYPE_CHECKING:
    from jinja2 import Template

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
LOOK_BACK = 4  # tokens: so many bytes has a character at most
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A fast tokenizer with its special tokens and chat template.

    Args:
        backend: the tokenizer of the `tokenizers` library.
        special_tokens: token by name ("eos_token", …), as chat templates see them.
        chat_template: Jinja source; None for a model that was not trained to chat.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        chat_template: str | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = special_tokens
        self.chat_template = chat_template

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

        Raises:
            ModelError: there is no `tokenizer.json`.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"no tokenizer.json in {directory}, expected a fast tokenizer")
        settings: dict[str, Any] = {}
        if (directory / "tokenizer_config.json").is_file():
            settings = json.loads((directory / "tokenizer_config.json").read_text())
        template = settings.get("chat_template")
        if (directory / "chat_template.jinja").is_file():
            template = (directory / "chat_template.jinja").read_text()
        special = {
            name: token["content"] if isinstance(token, dict) else token
            for name in SPECIAL_NAMES
            if (token := settings.get(name))
        }
        return cls(tokenizers.Tokenizer.from_file(str(path)), special, template)

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> "Tokenizer":
        """Take over a fast tokenizer of transformers.

        Raises:
            ModelError: it has no fast backend.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ModelError(f"expected a fast tokenizer, got {type(tokenizer).__name__}")
        special = {
            name: str(token)
            for name in SPECIAL_NAMES
            if (token := getattr(tokenizer, name, None)) is not None
        }
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        copy = tokenizers.Tokenizer.from_str(backend.to_str())
        return cls(copy, special, template)

    def save(self, directory: Path) -> None:
        """Write what `from_directory` reads; transformers reads it too."""
        self.backend.save(str(directory / "tokenizer.json"), pretty=False)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
        if self.chat_template is not None:
            (directory / "chat_template.jinja").write_text(self.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with ``add_special_tokens``, those the model wants around it.

        Raises:
            PromptError: the text holds bytes that were not UTF-8.
        """
        check_unicode(text, "a prompt")
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary give nothing."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def text_of(self, token_id: int) -> str:
        """What a token adds to a text, with the blank that decoders strip where a text begins."""
        behind = self.decode([*self.lead, token_id], skip_special_tokens=False)
        return behind[len(self.decode(self.lead, skip_special_tokens=False)) :]

    @functools.cached_property
    def lead(self) -> list[int]:
        """Any text: what comes behind it is not where a text begins."""
        return self.encode("a", add_special_tokens=False)

    def stream(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> "TextStream":
        """Decode token by token; the pieces join to what `decode` gives for all of them.

        `prompt`: the tokens before, whose text is not given again.
        """
        return TextStream(self, skip_special_tokens, prompt)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation; encode the result with ``add_special_tokens=False``.

        Raises:
            PromptError: no chat template, no message, or the template refuses the conversation.
        """
        if self.chat_template is None:
            raise PromptError(
                "this model has no chat template: it was not trained to chat; "
                "give a prompt to complete instead of a conversation"
            )
        if not messages:
            raise PromptError("a conversation needs at least one message, got none")
        read = [_read_message(message) for message in messages]
        try:
            return _compiled(self.chat_template).render(
                messages=read,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens | variables,
            )
        except Exception as error:  # a template is a program of the model's author
            raise PromptError(f"the chat template refuses this conversation: {error}") from error

    def token_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it."""
        return self.backend.token_to_id(token)

    @property
    def eos_token_id(self) -> int | None:
        token = self.special_tokens.get("eos_token")
        return None if token is None else self.token_id(token)

    @functools.cached_property
    def tokens(self) -> list[str | None]:
        """Tokens in the order of their ids, None where an id is not used."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            tokens[token_id] = token
        return tokens

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` skips."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of single bytes in a vocabulary that falls back to them (none when byte-level)."""
        candidates = (f"<0x{byte:02X}>" for byte in range(256))
        return frozenset(i for token in candidates if (i := self.token_id(token)) is not None)

    @functools.cached_property
    def longest(self) -> int:
        """Characters of the longest token."""
        return max((len(token) for token in self.tokens if token is not None), default=0)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give every id the same token."""
        joined = "\0".join("\1" if token is None else token for token in self.tokens)
        return hashlib.sha256(joined.encode()).hexdigest()[:16]


class TextStream:
    """Incremental decoding: what `push` returns is final and never ends inside a character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Tokens of the last piece: a decoder may look at them.
        self._context, self._context_text = self._end_of(prompt)
        self._held: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Append tokens; gives the text that they complete, often "" in mid-character."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """The rest, where the last tokens are no complete character."""
        return self._release(self._text())

    def _push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""  # a decoder never sees it
        self._held.append(token_id)
        # A run of fallback bytes is decoded as a whole: one bad byte spoils the ones before it.
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._text()
        return "" if text.endswith(REPLACEMENT) else self._release(text)

    def _text(self) -> str:
        return self._tokenizer.decode(self._context + self._held, self._skip)

    def _end_of(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """Tokens that a prompt ends with, but for a character that it cuts off, and their text."""
        seen = [one for one in islice(reversed(prompt), LOOK_BACK) if one not in self._skipped]
        tokens = [one for one in reversed(seen) if one not in self._tokenizer.byte_ids]
        while (text := self._tokenizer.decode(tokens, self._skip)).endswith(REPLACEMENT):
            tokens.pop()
        if not tokens and any(one not in self._skipped for one in prompt):
            tokens = self._tokenizer.lead
            text = self._tokenizer.decode(tokens, self._skip)
        return tokens, text

    def _release(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        if piece:
            self._context, self._held = self._held, []
            self._context_text = self._tokenizer.decode(self._context, self._skip)
        return piece


def first_difference(a: Tokenizer, b: Tokenizer) -> tuple[int, str | None, str | None] | None:
    """The lowest id that means another token in ``b``; None when the vocabularies are equal."""
    for i in range(max(a.vocab_size, b.vocab_size)):
        token_a = a.tokens[i] if i < a.vocab_size else None
        token_b = b.tokens[i] if i < b.vocab_size else None
        if token_a != token_b:
            return i, token_a, token_b
    return None


def _read_message(message: Any) -> dict[str, Any]:
    """A message as templates expect it: content as one text, also where it was given in parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(f"a message needs a role and a content, got {message!r:.80}")
    role, content = message["role"], message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_text_of_part(part) for part in content)
        message = message | {"content": content}
    if content is not None and not isinstance(content, str):
        raise PromptError(
            f"the content of a message must be text or a list of text parts, got {content!r:.80}"
        )
    # A template wraps even nothing into tokens, and the model makes something up.
    if role == "user" and not (content or "").strip():
        raise PromptError(f"a message of the user is empty: expected text, got {content!r}")
    return message


def _text_of_part(part: Any) -> str:
    """The text of {"type": "text", "text": …}, as OpenAI writes content in parts."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise PromptError(f'a part of a message must be of the type "text", got {kind!r:.80}')
    if not isinstance(part.get("text"), str):
        raise PromptError(f'a part of a message needs "text", got {part!r:.80}')
    return part["text"]


@functools.cache
def _compiled(source: str) -> "Template":
    """A chat template in a sandbox, with the helpers that templates on the hub expect."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it does nothing."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
