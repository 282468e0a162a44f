"""From a chat call to a prompt: tools, roles and earlier calls as chat templates know them."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.checks import shown
from outrider.errors import PromptError
from outrider.prompts import PromptReader, Submission
from outrider.results import CompletionOutput
from outrider.sampling_params import SamplingParams
from outrider.serving.errors import ApiError
from outrider.serving.parsers import CALL, END_CALL, END_THINK, THINK
from outrider.serving.protocol import ChatCall

# For templates that do not know of tools; Hermes' words for them, which many models were taught.
TOOLS_PROMPT = (
    "You may call functions to answer. These are given, as JSON schemas:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and arguments as JSON between tags:\n"
    '<tool_call>\n{{"name": NAME, "arguments": ARGUMENTS}}\n</tool_call>'
)


def read(
    prompts: PromptReader, tokenizer: Any, call: ChatCall, params: SamplingParams
) -> Submission:
    """The conversation as a prompt.

    Raises:
        PromptError: no chat template, or it refuses the conversation.
        ApiError: 400, a variable of the template that is not the client's to set.
    """
    template = getattr(tokenizer, "chat_template", None) or ""
    tools = _tools(call)
    messages = [_message(message, template) for message in call.messages]
    variables = dict(call.chat_template_kwargs or {})
    if reserved := {"messages", "tools", "self"} & variables.keys():
        raise ApiError(
            400,
            f"chat_template_kwargs holds {shown(reserved)}, expected other names",
            param="chat_template_kwargs",
        )
    if tools and "tools" not in template:
        messages, tools = _with_tools(messages, tools), None
    if tools:
        variables["tools"] = tools
    if call.add_generation_prompt is not None:
        variables["add_generation_prompt"] = call.add_generation_prompt
    return prompts.read_conversation(messages, params, variables)


def is_thinking(prompt: str | None) -> bool:
    """Whether the template has opened the model's thoughts at the end of the prompt."""
    return prompt is not None and prompt.rstrip().endswith(THINK)


def num_thought_tokens(tokenizer: Any, output: CompletionOutput, is_thinking: bool) -> int:
    """Tokens of the thoughts that an answer begins with, up to the tag that ends them."""
    token_ids = output.token_ids
    if not is_thinking and not output.text.lstrip().startswith(THINK):
        return 0
    if END_THINK not in output.text:
        return len(token_ids)

    def has_ended(count: int) -> bool:
        return END_THINK in tokenizer.decode(token_ids[:count], skip_special_tokens=False)

    return bisect_left(range(len(token_ids)), True, key=has_ended)


def _tools(call: ChatCall) -> list[dict[str, Any]] | None:
    if not call.calls_tools:
        return None
    return [tool.model_dump(exclude_none=True) for tool in call.tools or ()]


def _with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = TOOLS_PROMPT.format(tools=listed)
    first, *rest = messages or [{}]
    if first.get("role") != "system":
        return [{"role": "system", "content": told}, *messages]
    content = first.get("content")
    if isinstance(content, str):
        return [first | {"content": f"{content}\n\n{told}"}, *rest]
    return [first | {"content": [*(content or ()), {"type": "text", "text": told}]}, *rest]


def _message(message: dict[str, Any], template: str) -> dict[str, Any]:
    if message.get("role") == "developer" and "developer" not in template:
        message = message | {"role": "system"}  # OpenAI's newer name of it
    calls = message.get("tool_calls")
    if not calls:
        if "role" in message and message.get("content") is None:  # templates say it less well
            raise PromptError(f"a message without tool_calls needs a content, got {shown(message)}")
        return message
    if not isinstance(calls, list):
        raise PromptError(f"tool_calls of a message must be a list, got {shown(calls)}")
    read_calls = [_call(one) for one in calls]
    content = message.get("content") or ""
    if "tool_calls" in template:
        return message | {"content": content, "tool_calls": read_calls}
    if not isinstance(content, str):
        raise PromptError(f"the content beside tool_calls must be text, got {shown(content)}")
    texts = [f"{CALL}\n{json.dumps(one['function'])}\n{END_CALL}" for one in read_calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": "\n".join([content, *texts] if content else texts)}


def _call(given: Any) -> dict[str, Any]:
    """An earlier call with its arguments as an object, which is what templates write as JSON."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f"a call in tool_calls needs a function with a name, got {shown(given)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"arguments of {shown(function['name'])} are no JSON") from error
    called = {"name": function["name"], "arguments": arguments or {}}
    return dict(given) | {"function": called}
