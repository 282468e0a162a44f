"""The `outrider` command line: what a user gets wrong is one sentence and exit code 2."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from outrider.errors import MissingDependency, OutriderError, UserError

EXIT_USER_ERROR = 2
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells expect
COMMANDS = ("generate", "chat", "compare", "demo")
GROUPS: dict[str, tuple[str, ...]] = {  # commands with others below them
    "bench": ("peers",),  # runs on its own too
    "table": ("build", "inspect", "coverage", "merge", "prune"),
}

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
    try:
        app()
    except (UserError, MissingDependency) as error:
        _fail(str(error), EXIT_USER_ERROR)
    except OutriderError as error:
        _fail(str(error), EXIT_FAILURE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # or the interpreter complains about the pipe while it ends
        sys.exit(EXIT_FAILURE)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"outrider: {message}\n")
    sys.exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        from outrider import __version__

        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
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
        for name, group in groups.items():
            taken = {field: values.pop(field) for field in group.__dataclass_fields__}
            values[name] = group(**taken)
        command(**values)

    flat = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return run


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
