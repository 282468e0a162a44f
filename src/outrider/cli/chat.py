"""`outrider chat`: a conversation in the terminal."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import ModelOptions, SamplingOptions
from outrider.errors import PromptError, UserError

if TYPE_CHECKING:
    from outrider.cli.console import Colours
    from outrider.cli.prompts import Message
    from outrider.cli.stream import StreamedAnswer
    from outrider.llm import LLM
    from outrider.sampling_params import SamplingParams

HELP = "/stats numbers so far · /reset forget the conversation · /quit end (Ctrl-D) · Ctrl-C stop"


def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Talk to the model. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    from outrider.cli.console import Colours, messages

    params = sampling.params()
    llm = model.load()
    if llm.tokenizer.chat_template is None:
        raise PromptError(
            f"{llm.target.name} has no chat template, so it cannot chat; use 'outrider generate'"
        )
    conversation = Conversation(llm, params, Colours(), system)
    if sys.stdin.isatty():
        messages().print(f"{llm.target.name} · {HELP}", style="dim")
    for line in _lines():
        if not conversation.handle(line.strip()):
            break


@dataclass(slots=True)
class Conversation:
    """History of a chat, and the answers given so far."""

    llm: "LLM"
    params: "SamplingParams"
    colours: "Colours"
    system: str | None = None
    history: list["Message"] = field(default_factory=list)
    answers: list["StreamedAnswer"] = field(default_factory=list)

    def handle(self, line: str) -> bool:
        """Answer a line or obey a command; False ends the conversation."""
        from outrider.cli.console import messages

        if line in ("/quit", "/exit"):
            return False
        if line == "/reset":
            self.history.clear()
            messages().print("The conversation starts anew.", style="dim")
        elif line == "/stats":
            messages().print(self.statistics(), style="dim")
        elif line.startswith("/"):
            messages().print(f"no such command: {line.split()[0]} · {HELP}", style="dim")
        elif line:
            self.reply(line)
        return True

    def reply(self, line: str) -> None:
        """Stream the answer to one user turn; a turn that cannot be answered is taken back."""
        from outrider.cli.console import messages
        from outrider.cli.stream import print_summary, stream_answer

        system = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": line}
        try:
            with interrupt_flag() as stopped:
                prompt = [*system, *self.history, user]
                answer = stream_answer(self.llm, prompt, self.params, self.colours, stopped)
        except UserError as error:
            hint = " (/reset starts anew)" if self.history else ""
            messages().print(f"outrider: {error}{hint}")
            return
        self.history += [user, {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)
        print_summary(answer, self.colours)

    def statistics(self) -> str:
        """Totals over the conversation, `/reset` or not."""
        num_tokens = sum(len(answer.token_sources) for answer in self.answers)
        parts = [f"{len(self.answers)} answers · {num_tokens} tokens"]
        rates = [answer.decode_rate for answer in self.answers if answer.decode_rate]
        if rates:
            parts.append(f"{min(rates):.0f} to {max(rates):.0f} tokens/s")
        sources = [source for answer in self.answers for source in answer.token_sources]
        for name in sorted(set(sources)):
            parts.append(f"{name} {sources.count(name) / num_tokens:.0%} of the tokens")
        return " · ".join(parts)


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C of the body into a flag; a second one interrupts as usual.

    An exception out of the middle of a step would leave the engine half way through it.
    """
    pressed = threading.Event()

    def handler(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Lines of the user until the input ends; Ctrl-C drops the line being typed."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and history)
    while True:
        try:
            yield input("\n› ")
        except KeyboardInterrupt:
            sys.stderr.write("\n(Ctrl-D ends)\n")
        except EOFError:
            sys.stderr.write("\n")
            return
