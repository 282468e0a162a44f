"""What clients may send: the fields of OpenAI's API, those that vLLM adds, and ours.

A field that is not listed here is refused, also where OpenAI or vLLM would ignore it: whatever
might change the text either does so or is an error. Ranges are checked where the values go, in
`SamplingParams` and `Terms`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from outrider.checks import shown, token_ids
from outrider.errors import PromptError, SamplingError
from outrider.sampling_params import SamplingParams, biases
from outrider.serving.errors import ApiError
from outrider.serving.structure import (
    Signature,
    answer_rules,
    call_rules,
    structured_outputs,
    whole,
)
from outrider.terms import Terms

COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat goes on to its end
MAX_TOP_LOGPROBS = 20  # OpenAI's limit in chats
# Fields that are handed on under their own names.
SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("allowed_token_ids", "banned_token_ids", "include_stop_str_in_output"),
    "skip_special_tokens",
)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Part):
    """`include_usage`: a last chunk with the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against listeners; none is made


class Function(_Part):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _are_named(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if given is not None and given.get("type", "object") != "object":
            raise PydanticCustomError("schema", 'parameters must be a schema of type "object"')
        return given


class Tool(_Part):
    """OpenAI's wrapping of a function."""

    type: Literal["function"]
    function: Function


class Prediction(_Part):
    """Predicted Outputs: what the answer is expected to hold."""

    type: Literal["content"]
    content: str | list[Any]


class Call(_Part):
    """Fields that both endpoints know; null is the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prediction: Prediction | None = None
    response_format: dict[str, Any] | None = None
    # They never had a say in the text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    include_metrics: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    # Ours
    banned_token_ids: list[int] | None = None
    speculative: bool | int | list[str] | None = None
    deadline: float | None = None
    tag: str | None = None
    kind: str | None = None
    return_token_sources: bool | None = None

    @property
    def fields(self) -> dict[str, str]:
        """Where a client finds what the engine calls otherwise, by the engine's word for it."""
        fields = {"num_draft_tokens": "speculative", "sources": "speculative"}
        if self.response_format is not None:
            fields["structured_outputs"] = "response_format"
        return fields

    @property
    def num_choices(self) -> int:
        """Choices of one prompt; a number that cannot be is refused with the parameters."""
        return 1 if self.n is None else self.n

    @property
    def most_tokens(self) -> int | None:
        """Output tokens that the client asks for at most."""
        return self.max_tokens

    def params(self, owner: str) -> SamplingParams:
        """How tokens are chosen for this owner's call, checked.

        Raises:
            SamplingError: a value out of range.
            ApiError: fields that do not go together.
        """
        raise NotImplementedError

    def terms(self) -> Terms:
        """How the request is served.

        Raises:
            SamplingError: a value out of range.
        """
        switch = self.speculative
        sources = switch if isinstance(switch, list) else () if switch is False else None
        is_count = isinstance(switch, int) and not isinstance(switch, bool)
        given = {
            "priority": self.priority,
            "deadline": self.deadline,
            "tag": self.tag,
            "kind": self.kind,
            "sources": sources,
            "num_draft_tokens": switch if is_count else None,
        }
        return Terms(**{name: value for name, value in given.items() if value is not None})

    @property
    def form(self) -> Mapping[str, Any] | None:
        """What the answer follows, as `SamplingParams.structured_outputs`.

        Raises:
            ApiError: an unknown format, or two of them.
            SamplingError: what is no form.
        """
        return structured_outputs(self.response_format, self.structured_outputs)

    @property
    def rules(self) -> str | None:
        """The same as rules that thoughts may be put before; None where there is no way to."""
        return None if self.form is None else answer_rules(self.form)

    def sampling(self, owner: str, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """How tokens are chosen.

        Raises:
            SamplingError: a value out of range.
        """
        given = {name: getattr(self, name) for name in SAMPLING}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=None if self.logit_bias is None else biases(self.logit_bias),
            prediction=_predicted(self.prediction),
            structured_outputs=self.form,
            owner=owner,
            **given,
        )


class CompletionCall(Call):
    """Body of `/v1/completions`."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def listed(self) -> list[Any]:
        """The prompts, of which each may still be none.

        Raises:
            PromptError: not text, token ids, or a list of these.
        """
        if isinstance(self.prompt, str) or _is_list_of_ids(self.prompt):
            return [self.prompt]
        if not isinstance(self.prompt, list) or not self.prompt:
            raise PromptError(
                f"prompt must be text, a list of token ids, or a list of these, got "
                f"{shown(self.prompt)}"
            )
        return self.prompt

    @property
    def prompts(self) -> list[Any]:
        """Every prompt as `PromptReader.read_prompt` takes it; raises as `listed`."""
        return [
            one
            if isinstance(one, str)
            else {"prompt_token_ids": token_ids("prompt", one, PromptError)}
            for one in self.listed
        ]

    def params(self, owner: str) -> SamplingParams:
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "logprobs of an echoed prompt are not served", param="echo")
        most = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling(owner, most, self.logprobs)


class ChatCall(Call):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @field_validator("tools")
    @classmethod
    def _have_names_of_their_own(cls, given: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in given or ()]
        for name in names:
            if names.count(name) > 1:
                told = {"name": shown(name)}
                raise PydanticCustomError("twice", "two functions have the name {name}", told)
        return given

    @property
    def fields(self) -> dict[str, str]:
        fields = super().fields | {"prompt": "messages"}
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = "max_completion_tokens"
        if self.calls_tools and self.structured_outputs is None:
            fields.setdefault("structured_outputs", "tools")
        return fields

    @property
    def most_tokens(self) -> int | None:
        most = self.max_completion_tokens
        return self.max_tokens if most is None else most

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def form(self) -> Mapping[str, Any] | None:
        rules = self._call_rules(is_behind_thoughts=False)
        return super().form if rules is None else whole(rules)

    @property
    def rules(self) -> str | None:
        rules = self._call_rules(is_behind_thoughts=True)
        return super().rules if rules is None else rules

    def _call_rules(self, is_behind_thoughts: bool) -> str | None:
        """Rules for the calls of tools; None where the model is free to say what it wants.

        Raises:
            ApiError: a choice that is none, or that names no tool.
            SamplingError: what is no form.
        """
        choice, form = self.tool_choice, super().form
        named = None if choice in (None, "auto", "none", "required") else _named_function(choice)
        if choice == "required" or named is not None:
            known = [tool.function.name for tool in self.tools or ()]
            if not known or named not in (None, *known):
                said = f"{shown(choice)} needs {'that tool' if named else 'tools'}"
                raise ApiError(400, f"tool_choice: {said}, got {shown(known)}", param="tool_choice")
        if not self.calls_tools:
            return None
        functions = [one.function for one in self.tools or () if named in (None, one.function.name)]
        is_forced = choice == "required" or named is not None
        is_one = named is not None or self.parallel_tool_calls is False
        is_strict = any(one.strict for one in functions)
        if form is not None and "grammar" in form:
            if is_forced or is_one or is_strict:
                raise ApiError(
                    400,
                    "structured_outputs.grammar is the whole answer: give no tool_choice, "
                    "parallel_tool_calls or strict tools beside it",
                    param="structured_outputs",
                )
            return None
        if not (is_forced or is_one or form or is_strict):
            return None
        signatures = [
            Signature(one.name, one.parameters, is_forced or bool(one.strict)) for one in functions
        ]
        return call_rules(signatures, is_forced, is_one, form, is_behind_thoughts)

    def params(self, owner: str) -> SamplingParams:
        most, older = self.max_completion_tokens, self.max_tokens
        if most is not None and older is not None and most != older:
            raise ApiError(
                400,
                f"max_completion_tokens is {shown(most)} and max_tokens {shown(older)}: give one",
                param="max_tokens",
            )
        top = 0 if self.top_logprobs is None else self.top_logprobs
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise ApiError(
                400,
                f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {shown(top)}",
                param="top_logprobs",
            )
        if top and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self.sampling(owner, self.most_tokens, top if self.logprobs else None)


Body = TypeVar("Body", bound=Call)


def parse(kind: type[Body], body: Any) -> Body:
    """The checked body.

    Raises:
        ApiError: 400, with the path of the first fault and what stands there.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shown(body)}")
    body = {name: value for name, value in body.items() if value is not None}
    try:
        call = kind.model_validate(body)
    except ValidationError as error:
        raise _fault(error, body) from error
    if call.stream_options is not None and not call.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    return call


def _fault(error: ValidationError, body: Any) -> ApiError:
    faults = error.errors(include_url=False)
    first = faults[0]
    if not first["loc"]:  # a name that is no text
        return ApiError(400, f"the body is wrong: {first['msg']}")
    path = _path(first["loc"], body, first["type"] in ("missing", "extra_forbidden"))
    if first["type"] == "extra_forbidden":
        said = f"{shown(path)} is no field that this server knows, and none is ignored"
    elif first["type"] == "missing":
        said = f"{path} is missing"
    else:  # of a union, every member has its say
        ways = [one["msg"] for one in faults if one["loc"][0] == first["loc"][0]]
        said = f"{path}: {' or '.join(dict.fromkeys(ways))}, got {shown(first['input'])}"
    return ApiError(400, said, param=path)


def _path(places: Sequence[str | int], body: Any, names_absent: bool) -> str:
    """Names and indices as they are in the body, without the members of unions that places name.

    `names_absent`: the last place is one that the body should have, or whose meaning is unknown.
    """
    found: list[str] = []
    for place in places:
        try:
            body = body[place]
        except (KeyError, IndexError, TypeError):
            if not names_absent or place != places[-1]:
                continue
        found.append(str(place))
    return ".".join(found)


def _named_function(choice: Any) -> str:
    """The name in OpenAI's {"type": "function", "function": {"name": …}}."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice != {"type": "function", "function": {"name": name}} or not isinstance(name, str):
        raise ApiError(
            400,
            'tool_choice must be "auto", "none", "required" or a function with its name, '
            f"got {shown(choice)}",
            param="tool_choice",
        )
    return name


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def _predicted(given: Prediction | None) -> str | None:
    if given is None:
        return None
    if isinstance(given.content, str):
        return given.content
    texts = [part.get("text") if isinstance(part, dict) else None for part in given.content]
    for part, text in zip(given.content, texts, strict=True):
        if not isinstance(text, str) or part.get("type") != "text":
            raise SamplingError(
                f'prediction must be text or parts of the type "text", got {shown(part)}'
            )
    return "".join(text for text in texts if text is not None)
