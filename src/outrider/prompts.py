"""From what users give as a prompt to token ids: text, ids, or a conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.checks import shown
from outrider.errors import PromptError, PromptTooLong
from outrider.sampling_params import SamplingParams
from outrider.text import check_unicode

Prompt: TypeAlias = str | Mapping[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": ids}
Message: TypeAlias = Mapping[str, Any]  # {"role": …, "content": …}
Conversation: TypeAlias = Sequence[Message]

PROMPT_KEYS = {"prompt", "prompt_token_ids"}


@dataclass(slots=True)
class Submission:
    """One prompt, checked and tokenised."""

    token_ids: Sequence[int]
    params: SamplingParams
    text: str | None = None
    prediction: list[int] | None = None


class PromptReader:
    """Reads prompts with one tokenizer; None where only ids are taken.

    Args:
        max_model_len: tokens of a text at most. Text that cannot be so short is refused before it
            is tokenised, which takes a CPU 5 s for 8 MB.

    Raises:
        PromptError: what is given is no prompt, or text without a tokenizer.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def read_prompt(
        self, prompt: Any, params: SamplingParams, add_special_tokens: bool = True
    ) -> Submission:
        """A prompt to complete."""
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping):
            raise PromptError(
                f'a prompt must be text, {{"prompt": text}} or {{"prompt_token_ids": ids}}, '
                f"got {shown(prompt)}"
            )
        given = PROMPT_KEYS & prompt.keys()
        if not given or prompt.keys() - PROMPT_KEYS:
            raise PromptError(
                f'a prompt needs "prompt" or "prompt_token_ids" and nothing else, '
                f"got the keys {shown(list(prompt))}"
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is None:
            ids = self._encode(text, "the prompt", add_special_tokens)
        elif text is not None and not isinstance(text, str):
            raise PromptError(f"the prompt must be text, got {shown(text)}")
        return Submission(ids, params, text, self._prediction(params))

    def read_conversation(
        self, messages: Any, params: SamplingParams, variables: Mapping[str, Any]
    ) -> Submission:
        """A conversation to go on with; `variables` are for the chat template."""
        if self._tokenizer is None:
            raise PromptError("a conversation needs a tokenizer, this LLM was made without one")
        if not is_conversation(messages):
            raise PromptError(
                f'a conversation must be a list of {{"role": …, "content": …}}, '
                f"got {shown(messages)}"
            )
        text = self._tokenizer.chat([dict(message) for message in messages], **variables)
        ids = self._encode(text, "the conversation", False)
        return Submission(ids, params, text, self._prediction(params))

    def _prediction(self, params: SamplingParams) -> list[int] | None:
        if params.prediction is None:
            return None
        if isinstance(params.prediction, str):
            return self._encode(params.prediction, "the prediction", False)
        return list(params.prediction)

    def _encode(self, text: Any, what: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise PromptError(f"{what} must be text, got {shown(text)}")
        if self._tokenizer is None:
            raise PromptError(f"{what} is text, and this LLM was made without a tokenizer")
        longest = getattr(self._tokenizer, "longest", None)
        if longest is not None and len(text) > longest * self._max_model_len:
            raise PromptTooLong(
                f"{what} has {len(text)} characters, more than {self._max_model_len} tokens can "
                f"hold, which are all that fit"
            )
        check_unicode(text, what)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def is_conversation(messages: Any) -> bool:
    """Whether it has the form of a list of messages."""
    return (
        isinstance(messages, Sequence)
        and len(messages) > 0
        and all(isinstance(message, Mapping) for message in messages)
    )
