"""The offline API, with vLLM's names: `LLM(...).generate(prompts, SamplingParams(...))`."""

import itertools
import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from outrider.checks import boolean, integer, shown, token_ids
from outrider.drafting.build import SpeculativeConfig, build_sources, check_config, split_rule
from outrider.drafting.methods import METHODS
from outrider.drafting.source import DraftSource
from outrider.engine.engine import Engine, check_sizes
from outrider.engine.speculation import layers_read
from outrider.engine.verification import make_verifier
from outrider.errors import ConfigError, PromptError, SamplingError, SourceError
from outrider.policy.live import LivePolicy
from outrider.policy.rule_document import load_policy
from outrider.policy.view import Policy
from outrider.prompts import Conversation, Prompt, PromptReader, Submission, is_conversation
from outrider.results import RequestOutput, SpeculativeMetrics, StreamChunk
from outrider.sampling_params import SamplingParams
from outrider.target.base import PAGE_SIZE, Target
from outrider.target.find import identity_of
from outrider.terms import Terms
from outrider.threads import set_num_threads

ParamsLike: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
TermsLike: TypeAlias = Terms | Sequence[Terms] | None
RulesLike: TypeAlias = str | Path | Mapping[str, Any] | None
T = TypeVar("T", SamplingParams, Terms)

KV_SHARE = 0.25  # of the free memory that KV may take unless told otherwise


class LLM:
    """A target with its draft sources. Threads may share one; they take turns step by step.

    Args:
        model: name, directory or GGUF file; None for the default target. A model of transformers
            is taken over for good: its own `generate` cannot be used afterwards.
        tokenizer: another tokenizer than the model's own: a name, a directory or a `Tokenizer`.
        dtype: "auto", "bfloat16" or "float32".
        speculative_config: who drafts: "auto", vLLM's object, a list of objects and sources, a
            `DraftSource`, or None for plain decoding.
        max_model_len: longest text of prompt and output; default: the model's own limit.
        max_num_seqs: requests decoded at the same time.
        max_num_batched_tokens: rows of one forward.
        kv_cache_tokens: room of the KV cache; default: full length for all requests, within a
            quarter of the free memory.
        seed: makes requests without a seed of their own repeatable.
        deterministic: a token does not depend on what shares its forward, so that speculative
            text is plain text even in bf16; None: where the target can.
        device: "auto", "cpu" or "cuda".
        num_threads: CPU threads; default: as OUTRIDER_NUM_THREADS says, else as torch has it.
        target: a target that is already loaded, instead of `model`; `tokenizer` is then an object.
        eos_token_ids: what ends a text, an id or several; default: the model's own, with `target`
            the tokenizer's.
        policy: decides which draft tokens go to the target; default: the planner, by what pays.
        rules: a JSON policy that narrows what may be drafted: a file, or the document itself. It
            can be exchanged at any time: `LLM.rules.replace(document)`.
        enable_prefix_caching: KV of earlier texts is kept while there is room, and a prompt that
            begins like one of the same owner does not compute it again.

    Raises:
        ModelError: the model is unknown or cannot be run exactly; the message says why.
        ConfigError: an unknown key or value in the speculative config, or a bad size; the
            rules are none, the message names the place of the fault.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: Any = None,
        dtype: str = "auto",
        speculative_config: SpeculativeConfig = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        kv_cache_tokens: int | None = None,
        seed: int | None = None,
        deterministic: bool | None = None,
        device: str = "auto",
        num_threads: int | None = None,
        target: Target | None = None,
        eos_token_ids: int | Sequence[int] | None = None,
        policy: Policy | None = None,
        rules: RulesLike = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        set_num_threads(num_threads)
        _check_options(dtype, device, deterministic, seed)
        check_sizes(max_num_seqs, max_num_batched_tokens, kv_cache_tokens, max_model_len)
        given_eos = None if eos_token_ids is None else _eos_ids(eos_token_ids)
        own_eos: Sequence[int] = ()
        boolean("enable_prefix_caching", enable_prefix_caching)
        document = load_policy(Path(rules)) if isinstance(rules, str | Path) else rules
        LivePolicy(document)
        check_config(speculative_config)  # loading a model takes longer than finding a typo
        _, rule = split_rule(speculative_config)
        is_ours = target is None  # nobody else has anything in its KV
        self._source: Path | None = None  # where the weights were loaded from
        if target is None:
            from outrider.target.load import load_target

            target, loaded = load_target(
                model, dtype, device, max_model_len, deterministic, tokenizer
            )
            tokenizer, self._source = loaded.tokenizer, loaded.source
            own_eos = loaded.eos_token_ids
        elif isinstance(target, type) or not hasattr(target, "forward"):
            raise ConfigError(f"target must be a Target that is loaded, got {shown(target)}")
        elif isinstance(tokenizer, str | Path):
            raise ConfigError(f"with a target, tokenizer must be an object, got {shown(tokenizer)}")
        elif tokenizer is not None and tokenizer.eos_token_id is not None:
            own_eos = [tokenizer.eos_token_id]
        self.target: Target = target
        self.tokenizer: Any = tokenizer  # a Tokenizer, or anything with its methods
        self.eos_token_ids = _known_eos(given_eos, own_eos, target.vocab_size)
        sources = build_sources(
            speculative_config, _draft_model_loader(dtype, device), rule, self.tokenizer, target
        )
        token_bytes = _token_bytes(target, sources, enable_prefix_caching)
        if kv_cache_tokens is None:
            kv_cache_tokens = _default_kv_tokens(target, token_bytes, max_num_seqs, max_model_len)
        _check_memory(target, token_bytes, kv_cache_tokens)
        self.engine = Engine(
            target,
            sources,
            verifier=make_verifier(rule, self.eos_token_ids),
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_tokens=kv_cache_tokens,
            max_model_len=max_model_len,
            planner=policy,
            seed=seed,
            reuse_prefixes=enable_prefix_caching,
        )
        names = [source.name for source in self.engine.speculation.sources]
        if is_ours and policy is None:
            self.engine.measure_costs()
        self.rules = LivePolicy(document, {*METHODS, *names})
        self.engine.speculation.rules = self.rules
        self.prompts = PromptReader(self.tokenizer, self.engine.max_model_len)
        self._ids = itertools.count()
        self._mailboxes: dict[str, deque[StreamChunk]] = {}

    @property
    def target_id(self) -> str | None:
        """Which weights the target has, see `identity_of`; None of one that was given loaded."""
        return None if self._source is None else identity_of(self._source)

    @property
    def metrics(self) -> SpeculativeMetrics:
        """Totals over all requests so far."""
        return self.engine.metrics

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsLike = None,
        use_tqdm: bool = False,
        *,
        terms: TermsLike = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results are in the order of the prompts.

        Args:
            prompts: text, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
            sampling_params: one for all, or one per prompt; default: `SamplingParams()`.
            use_tqdm: show progress.
            terms: how they are served: one for all, or one per prompt.

        Raises:
            PromptError: a prompt is empty, too long, of a wrong type, or has unknown ids.
            SamplingError: as many parameters or terms as prompts were expected, ids are unknown,
                or a source is.
        """
        is_one = isinstance(prompts, str | Mapping)
        listed = [prompts] if is_one else _as_list(prompts, "prompts")
        params = _params_for(len(listed), sampling_params)
        submissions = [self.prompts.read_prompt(*pair) for pair in zip(listed, params, strict=True)]
        return self._run(submissions, _terms_for(len(listed), terms), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsLike = None,
        use_tqdm: bool = False,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        terms: TermsLike = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or a list of conversations.

        Raises:
            PromptError: the model has no chat template, or the template refuses a conversation.
        """
        listed = _as_list(messages, "messages")
        conversations: list[Any] = [listed] if is_conversation(listed) else listed
        params = _params_for(len(conversations), sampling_params)
        variables = {"tools": tools, **(chat_template_kwargs or {})}
        submissions = [
            self.prompts.read_conversation(*pair, variables)
            for pair in zip(conversations, params, strict=True)
        ]
        return self._run(submissions, _terms_for(len(conversations), terms), use_tqdm)

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        terms: Terms | None = None,
    ) -> Generator[StreamChunk, None, None]:
        """Chunks of one answer as they come; their joined text is what `generate` gives.

        Bad input raises here, not at the first chunk. Closing the generator aborts the request.
        """
        params = _params_for(1, sampling_params)[0]
        if isinstance(prompt, str | Mapping):
            submission = self.prompts.read_prompt(prompt, params)
        else:
            submission = self.prompts.read_conversation(_as_list(prompt, "a prompt"), params, {})
        [served] = _terms_for(1, terms)
        self.engine.check(submission.token_ids, params, served)
        return self._stream(submission, served)

    def _stream(self, submission: Submission, terms: Terms) -> Generator[StreamChunk, None, None]:
        with self._submitted([submission], [terms]) as (request_id,):
            mailbox = self._mailboxes[request_id]
            while True:
                while not mailbox:
                    self._advance([mailbox])
                chunk = mailbox.popleft()
                yield chunk
                if chunk.result is not None:
                    return

    def _run(
        self, submissions: Sequence[Submission], terms: Sequence[Terms], use_tqdm: bool
    ) -> list[RequestOutput]:
        for submission, served in zip(submissions, terms, strict=True):
            self.engine.check(submission.token_ids, submission.params, served)
        results: dict[str, RequestOutput] = {}
        with (
            self._submitted(submissions, terms) as request_ids,
            _progress(len(request_ids), use_tqdm) as bar,
        ):
            mailboxes = [self._mailboxes[request_id] for request_id in request_ids]
            while len(results) < len(request_ids):
                self._advance(mailboxes)
                for request_id, mailbox in zip(request_ids, mailboxes, strict=True):
                    while mailbox:
                        result = mailbox.popleft().result
                        if result is not None:
                            results[request_id] = result
                            bar()
        return [results[request_id] for request_id in request_ids]

    @contextmanager
    def _submitted(
        self, submissions: Sequence[Submission], terms: Sequence[Terms]
    ) -> Iterator[list[str]]:
        """Requests under way; whatever happens inside, none of them outlives the block."""
        request_ids = [str(next(self._ids)) for _ in submissions]
        try:
            with self.engine.lock:
                for request_id, submission, served in zip(
                    request_ids, submissions, terms, strict=True
                ):
                    self._mailboxes[request_id] = deque()
                    self.engine.add_request(
                        request_id,
                        submission.token_ids,
                        submission.params,
                        prompt=submission.text,
                        prediction=submission.prediction,
                        terms=served,
                    )
            yield request_ids
        except GeneratorExit:  # nothing went wrong: the caller has heard enough
            self._drop(request_ids)
            raise
        except BaseException:
            with suppress(SourceError):  # what is under way already says more
                self._drop(request_ids)
            raise
        else:
            self._drop(request_ids)

    def _drop(self, request_ids: Sequence[str]) -> None:
        with self.engine.lock:
            for request_id in request_ids:
                self._mailboxes.pop(request_id, None)
            self.engine.abort(*request_ids)

    def _advance(self, mailboxes: Sequence[deque[StreamChunk]]) -> None:
        """One step, unless another thread's step has brought something for us meanwhile."""
        with self.engine.lock:
            if any(mailboxes):
                return
            for chunk in self.engine.step():
                mailbox = self._mailboxes.get(chunk.request_id)
                if mailbox is not None:  # None: an aborted request nobody listens to
                    mailbox.append(chunk)


def _as_list(values: Any, name: str) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise PromptError(f"{name} must be a list, got {shown(values)}")
    return list(values)


def _params_for(count: int, params: ParamsLike) -> list[SamplingParams]:
    """One per prompt."""
    return _each(
        count, SamplingParams() if params is None else params, SamplingParams, "sampling_params"
    )


def _terms_for(count: int, terms: TermsLike) -> list[Terms]:
    """One per prompt."""
    return _each(count, Terms() if terms is None else terms, Terms, "terms")


def _each(count: int, given: Any, kind: type[T], name: str) -> list[T]:
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        raise SamplingError(f"{name} must be {kind.__name__} or a list of them, got {shown(given)}")
    if len(given) != count:
        raise SamplingError(f"{count} prompts need {count} {name}, got {len(given)}")
    return list(given)


def _draft_model_loader(dtype: str, device: str) -> Any:
    def load(name: str) -> tuple[Target, object | None]:
        from outrider.target.load import load_target

        target, loaded = load_target(name, dtype, device)
        return target, loaded.tokenizer

    return load


def _check_options(dtype: object, device: object, deterministic: object, seed: object) -> None:
    for name, value, kind in (("dtype", dtype, torch.dtype), ("device", device, torch.device)):
        if not isinstance(value, str | kind):
            raise ConfigError(
                f"{name} must be a name or a torch.{kind.__name__}, got {shown(value)}"
            )
    if deterministic is not None:
        boolean("deterministic", deterministic)
    if seed is not None:
        integer("seed", seed, -(2**63), 2**64 - 1)


def _eos_ids(given: Any) -> list[int]:
    if isinstance(given, Integral) and not isinstance(given, bool):
        given = [given]
    return token_ids("eos_token_ids", given)


def _known_eos(given: Sequence[int] | None, own: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """What ends a text. Files may name tokens that the model has no logits of; users may not."""
    if given is None:
        return tuple(token for token in own if 0 <= token < vocab_size)
    for token in given:
        integer("a token id in eos_token_ids", token, 0, vocab_size - 1)
    return tuple(given)


def _token_bytes(target: Target, sources: Sequence[DraftSource], keeps_features: bool) -> int:
    """What a token takes in the KV cache, with the features that drafters want of known texts."""
    layers = layers_read(sources, target.num_layers)
    feature_bytes = len(layers) * target.hidden_size * target.dtype.itemsize
    return target.kv_bytes_per_token + (feature_bytes if keeps_features else 0)


def _check_memory(target: Target, token_bytes: int, kv_cache_tokens: int) -> None:
    """Refuse a KV cache that the machine could not hold even if it were empty."""
    most = _memory_bytes(target.device) // max(1, token_bytes)
    if kv_cache_tokens > most:
        raise ConfigError(
            f"kv_cache_tokens must be at most {most}, which is all the memory there is at "
            f"{token_bytes} bytes a token, got {kv_cache_tokens}"
        )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _default_kv_tokens(
    target: Target, token_bytes: int, max_num_seqs: int, max_model_len: int | None
) -> int:
    """Full length for every request, within a share of the free memory, but one full text."""
    length = min(max_model_len or target.max_model_len, target.max_model_len)
    affordable = int(KV_SHARE * _free_bytes(target.device)) // max(1, token_bytes)
    return max(length, PAGE_SIZE, min(max_num_seqs * length, affordable))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Any]:
    """A function to call for every finished prompt."""
    if not is_shown:
        yield lambda: None
        return
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn()
    ) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
