"""The `outrider` command line: what a user gets wrong is one sentence and exit code 2."""

import importlib
import inspect
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer

from outrider.cli.interrupts import EXIT_INTERRUPTED, told_of
from outrider.errors import ConfigError, MissingDependency, OutriderError, UserError

EXIT_USER_ERROR = 2
EXIT_FAILURE = 1
ENDING_SIGNALS = ("SIGTERM", "SIGHUP")
COMMANDS = ("generate", "chat", "compare", "serve", "demo", "estimate")
GROUPS: dict[str, tuple[str, ...]] = {  # commands with others below them
    "bench": ("peers",),  # runs on its own too
    "policy": ("check", "explain", "schema"),
    "table": ("build", "inspect", "coverage", "merge", "prune"),
    "train": ("data", "features", "run", "eval", "calibrate"),
}

WRITTEN = ("output", "features")  # files and directories; others say it themselves

app = typer.Typer(
    name="outrider",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line and end the process with its exit code."""
    _check_streams()
    with _unwinding():
        _run()


def _run() -> None:
    try:
        code = _exit_code()
        sys.stdout.flush()  # what cannot be written is to be known here, not while Python ends
        sys.exit(code)
    except (UserError, MissingDependency) as error:
        _fail(str(error), EXIT_USER_ERROR)
    except OutriderError as error:
        _fail(str(error), EXIT_FAILURE)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        sys.exit(EXIT_FAILURE)
    except OSError as error:
        _drop_output()
        reason = error.strerror or str(error)
        where = error.filename or "the output"
        _fail(f"cannot read or write {where}: {reason}", EXIT_FAILURE)


def _exit_code() -> Any:
    try:
        app()
    except SystemExit as end:
        return end.code
    return 0


@contextmanager
def _unwinding() -> Iterator[None]:
    """End on SIGTERM and SIGHUP as on Ctrl-C: what the body has open is closed and removed.

    A second one ends the process at once. `nohup` has SIGHUP ignored, and so it stays.
    """
    ends = [number for name in ENDING_SIGNALS if (number := getattr(signal, name, None))]
    before = {number: signal.getsignal(number) for number in ends}

    def end(number: int, _: object) -> NoReturn:
        for other in before:
            signal.signal(other, signal.SIG_DFL)
        raise SystemExit(128 + number)

    for number, handler in before.items():
        if handler == signal.SIG_DFL:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler == signal.SIG_DFL:
                signal.signal(number, handler)


def _check_streams() -> None:
    """Make sure of the standard streams: a shell may close them, a locale may not know them."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        _fail("standard output is closed: expected a place to write the answer", EXIT_FAILURE)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused where a prompt is checked
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Let what is still buffered go nowhere, or Python complains about it while it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"outrider: {message}\n")
    sys.exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        from outrider import __version__

        typer.echo(f"outrider {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Decode a language model faster, with exactly the text it would have written.

    outrider drafts several tokens at a time, checks them in one forward of the target model and
    keeps those the target agrees with. Start with [bold]outrider demo[/bold].
    """


def _with_flat_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with each dataclass parameter replaced by one parameter per field.

    Typer builds options from a signature; the groups in `options.py` are written once and every
    command that takes a group gets all of its flags.
    """
    groups: dict[str, Any] = {}
    flat: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        fields = getattr(parameter.annotation, "__dataclass_fields__", None)
        if fields is None:
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = parameter.annotation
        flat.extend(inspect.signature(parameter.annotation).parameters.values())

    def run(**values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):  # which no range refuses
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} must be a finite number, got {value}")
        for name, group in groups.items():
            taken = {field: values.pop(field) for field in group.__dataclass_fields__}
            values[name] = group(**taken)
        with told_of():  # here, as Typer makes an exit code of Ctrl-C
            command(**values)

    _check_names(flat)
    flat = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    run.__doc__ = _unwrapped(inspect.getdoc(command) or "")
    run.__name__ = command.__name__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return run


def _check_names(parameters: list[inspect.Parameter]) -> None:
    """Have empty names of what is written refused, which an unset variable of a shell leaves.

    `Path` would read them as the current directory.
    """
    for parameter in parameters:
        if parameter.name in WRITTEN:
            _, option = get_args(parameter.annotation)
            option.parser, option.metavar = _path, "<path>"


def _path(given: str | Path) -> Path:
    if not str(given):
        raise typer.BadParameter("the name is empty, expected that of a file or a directory")
    return Path(given)


def _unwrapped(text: str) -> str:
    """Each paragraph on one line: the terminal's width decides where lines end."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


app.callback()(_with_flat_options(_root))
for _name in COMMANDS:
    _module = importlib.import_module(f"outrider.cli.{_name}")
    app.command(_name)(_with_flat_options(getattr(_module, _name)))
for _name, _below in GROUPS.items():
    _module = importlib.import_module(f"outrider.cli.{_name}")
    _group = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
    _group.callback()(_with_flat_options(getattr(_module, _name)))
    for _command in _below:
        _group.command(_command)(_with_flat_options(getattr(_module, _command)))
    app.add_typer(_group, name=_name)


if __name__ == "__main__":
    main()
