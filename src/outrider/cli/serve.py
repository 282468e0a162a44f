"""`outrider serve`: the model behind an OpenAI-compatible HTTP API."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import ModelOptions, text_or_file
from outrider.errors import ConfigError, MissingDependency

LIMITS_PANEL = "Limits"


def serve(
    model: ModelOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients have to show; may be repeated. @FILE: one key a line.",
            metavar="KEY|@FILE",
        ),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that may read and change the policy; may be repeated. Default: any key.",
            metavar="KEY|@FILE",
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="JSON policy; read again when it changes, and on SIGHUP."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: its own name.")
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(help="'think' tells <think>…</think> apart, as reasoning_content."),
    ] = None,
    enable_per_request_metrics: Annotated[
        bool,
        typer.Option("--enable-per-request-metrics", help="Tell vLLM's metrics in every answer."),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of the engine's steps.")
    ] = None,
    max_waiting: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Answers that may wait for a seat, others get 429. Default: --max-num-seqs.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
    max_calls_per_key: Annotated[
        int | None,
        typer.Option(min=1, help="Calls under way with one API key.", rich_help_panel=LIMITS_PANEL),
    ] = None,
    max_body_bytes: Annotated[
        int,
        typer.Option(min=1, help="Longest body of a call.", rich_help_panel=LIMITS_PANEL),
    ] = 8 << 20,
    drain_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Time that calls have to end after SIGTERM. Default: as long as they take.",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP, for any client of OpenAI's API."""
    if name is not None and model.model is not None:
        raise ConfigError(f"the model is given twice: {name} and --model {model.model}")
    from outrider.policy.rule_document import compile_policy, load_policy

    try:
        from outrider.serving.memory import share_heaps
        from outrider.serving.server import serve as run
        from outrider.serving.service import Settings
        from outrider.serving.trace import check_trace
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"outrider serve needs {error.name}: pip install 'outrider[serve]'"
        ) from error
    settings = Settings(
        api_keys=key_list(api_key or [], "--api-key"),
        admin_keys=key_list(admin_key or [], "--admin-key"),
        policy=policy,
        served_model_name=served_model_name,
        max_body_bytes=max_body_bytes,
        max_waiting=max_waiting,
        max_calls_per_key=max_calls_per_key,
        reasoning_parser=reasoning_parser,
        includes_metrics=enable_per_request_metrics,
        trace=trace,
        owns_cpus=True,
    )
    if policy is not None:
        compile_policy(load_policy(policy))  # a typo is found sooner than a model is loaded
    if trace is not None:
        check_trace(trace)
    model.model = name or model.model
    share_heaps()
    run(model.load(), settings, host, port, drain_seconds)


def key_list(given: list[str], option: str) -> list[str]:
    """The keys themselves, also where a file holds them.

    Raises:
        ConfigError: a file that cannot be read, or no key where one was to be.
    """
    keys = []
    for one in given:
        found = [line.strip() for line in text_or_file(one, option).splitlines() if line.strip()]
        if not found:  # an empty variable of a shell must not open the server to everybody
            raise ConfigError(f"{option} expects a key or @FILE with keys, got none in {one!r}")
        keys += found
    return keys
