"""What Prometheus reads: vLLM's names for what vLLM counts too, and ours for the rest.

Counters of the engine are read when they are asked for; latencies are observed as answers come.
Times are seconds. No label takes a value that a client chooses.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.engine.engine import Engine
from outrider.results import RequestMetrics, RequestOutput, SourceMetrics, SpeculativeMetrics
from outrider.serving.trace import PHASES
from outrider.serving.worker import Item
from outrider.target.base import PAGE_SIZE

TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
CALL_SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 60.0, 120.0, 240.0, 480.0),
)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
KEPT_GAPS = 1000
CHOICES = (1, 2, 5, 10, 20)
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics")
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", TOKEN_SECONDS),
    "inter_token_latency_seconds": ("Between tokens of one choice.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean of each request.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", CALL_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first forward.", CALL_SECONDS),
    "request_prefill_time_seconds": ("From the first forward to the first token.", CALL_SECONDS),
    "request_inference_time_seconds": ("From the first forward to the last token.", CALL_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", CALL_SECONDS),
    "request_prompt_tokens": ("Tokens of the prompt.", SIZES),
    "request_generation_tokens": ("Tokens of the output.", SIZES),
    "request_params_n": ("Choices that were asked for.", CHOICES),
    "request_params_max_tokens": ("Output tokens that were asked for at most.", SIZES),
}


class Metrics:
    """All metrics of one server."""

    def __init__(self, engine: Engine, model: str) -> None:
        disable_created_metrics()  # a second series for each, which nothing here reads
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._registry.register(_EngineCollector(engine, self._labels))
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", about, list(self._labels), buckets=buckets, registry=self._registry
            ).labels(**self._labels)
            for name, (about, buckets) in HISTOGRAMS.items()
        }
        self._ended = self._counter("vllm:request_success", "Ended choices.", "finished_reason")
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._queried = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for.")
        self._cached = self._counter("vllm:prefix_cache_hits", "Prompt tokens whose KV was known.")
        output = self._counter("vllm:generation_tokens", "Tokens of outputs.")
        self._output = output.labels(**self._labels)
        self._num_new = 0  # tokens, and …
        self._gaps: list[float] = []  # … seconds between them, that were not yet counted
        self._preempted = self._counter(
            "vllm:num_preemptions", "Times that a request gave its KV back, of ended requests."
        )
        self._calls = self._counter("outrider_http_requests", "HTTP calls.", "path", "status")

    def render(self) -> bytes:
        """The text format of Prometheus."""
        self._take_in()
        return generate_latest(self._registry)

    def call(self, path: str, status: int) -> None:
        """Count an HTTP call that has ended."""
        known = path if path in PATHS else "other"
        self._calls.labels(**self._labels, path=known, status=str(status)).inc()

    def watch(self) -> "Watch":
        """To be told what one call's answer brings."""
        return Watch(self)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram of HISTOGRAMS."""
        self._histograms[name].observe(value)

    def tokens(self, count: int, gap: float | None) -> None:
        """Count what one step said to one choice, so many seconds after the step before.

        The sums are made a thousand at a time, or when somebody asks: done one by one beside the
        forwards, which leave nothing in the caches, they took a fifth of the event loop's time.
        """
        self._num_new += count
        if gap is not None:
            self._gaps.append(gap)
            if len(self._gaps) >= KEPT_GAPS:
                self._take_in()

    def _take_in(self) -> None:
        gaps, self._gaps = self._gaps, []
        for gap in gaps:
            self.observe("inter_token_latency_seconds", gap)
        self._output.inc(self._num_new)
        self._num_new = 0

    def ended(self, result: RequestOutput, n: int, max_tokens: int | None) -> None:
        """Observe a prompt whose choices have all ended."""
        times = result.metrics
        num_output = sum(len(output.token_ids) for output in result.outputs)
        self._prompt.labels(**self._labels).inc(len(result.prompt_token_ids))
        self._queried.labels(**self._labels).inc(len(result.prompt_token_ids))
        self._cached.labels(**self._labels).inc(times.num_cached_tokens)
        self._preempted.labels(**self._labels).inc(times.num_preemptions)
        for output in result.outputs:
            reason = str(output.finish_reason)
            self._ended.labels(**self._labels, finished_reason=reason).inc()
            self.observe("request_generation_tokens", len(output.token_ids))
        self.observe("request_prompt_tokens", len(result.prompt_token_ids))
        self.observe("request_params_n", n)
        if max_tokens is not None:
            self.observe("request_params_max_tokens", min(max_tokens, SIZES[-1]))
        self._observe_times(times, max(1, num_output // n))

    def _observe_times(self, times: RequestMetrics, num_tokens: int) -> None:
        arrival, scheduled = times.arrival_time, times.scheduled_time
        first, last = times.first_token_time, times.finished_time
        if scheduled is None or first is None or last is None:
            return  # it ended before it had begun
        self.observe("time_to_first_token_seconds", first - arrival)
        self.observe("e2e_request_latency_seconds", last - arrival)
        self.observe("request_queue_time_seconds", scheduled - arrival)
        self.observe("request_prefill_time_seconds", first - scheduled)
        self.observe("request_inference_time_seconds", last - scheduled)
        self.observe("request_decode_time_seconds", last - first)
        per_token = (last - first) / max(1, num_tokens - 1)
        self.observe("request_time_per_output_token_seconds", per_token)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, [*self._labels, *labels], registry=self._registry)


class Watch:
    """Observes the chunks of one call."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: dict[tuple[int, int], float] = {}  # (prompt, choice) -> time of its last chunk

    def see(self, items: Iterable[Item]) -> None:
        """Take in what a step said: the tokens of one step share the time since the last."""
        for prompt, chunk, time in items:
            if chunk.token_ids:
                before = self._last.get((prompt, chunk.index))
                self._last[prompt, chunk.index] = time
                gap = None if before is None else time - before
                self._metrics.tokens(len(chunk.token_ids), gap)


class _EngineCollector(Collector):
    """Reads the engine's own counts; it may be in the middle of a step meanwhile."""

    def __init__(self, engine: Engine, labels: Mapping[str, str]) -> None:
        self._engine = engine
        self._names = list(labels)
        self._values = list(labels.values())

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        arena, scheduler = engine.arena, engine.scheduler
        used = 1 - arena.num_free_pages / arena.num_pages
        yield self._gauge("vllm:num_requests_running", "Being decoded.", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Waiting.", len(scheduler.waiting))
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", used)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=[*self._names, "block_size", "blocks"]
        )
        info.add_metric([*self._values, str(PAGE_SIZE), str(arena.num_pages)], 1)
        yield info
        yield from self._speculation(engine.metrics)
        yield from self._sources(dict(engine.metrics.per_source))
        yield from self._health(engine)
        times = {(name,): getattr(engine.times, name) for name in PHASES}
        about = "Seconds of the engine's steps by phase."
        yield self._counter("outrider_step_seconds", about, times, "phase")
        yield self._counter("outrider_steps", "Steps of the engine.", {(): engine.times.steps})

    def _speculation(self, metrics: SpeculativeMetrics) -> Iterator[Metric]:
        counts = {
            "num_drafts": ("Steps that verified drafts.", metrics.num_spec_steps),
            "num_draft_tokens": ("Draft tokens verified.", metrics.num_draft_tokens),
            "num_accepted_tokens": (
                "Draft tokens kept, without bonus tokens.",
                metrics.num_accepted_draft_tokens,
            ),
        }
        for name, (about, value) in counts.items():
            yield self._counter(f"vllm:spec_decode_{name}", about, {(): value})
        by_position: dict[tuple[str, ...], float] = {}
        for split in list(metrics.per_source.values()):
            for position, count in enumerate(list(split.accepted_per_position)):
                key = (str(position),)
                by_position[key] = by_position.get(key, 0) + count
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield self._counter(name, "Draft tokens kept, by position.", by_position, "position")
        causes = {(cause,): count for cause, count in dict(metrics.rejection_causes).items()}
        about = "Draft tokens that were not kept, by cause."
        yield self._counter("speculative_rejection_cause", about, causes, "cause")

    def _sources(self, splits: Mapping[str, SourceMetrics]) -> Iterator[Metric]:
        about = "Share of the draft tokens that were kept, since the start."
        rates = GaugeMetricFamily("speculative_accept_rate", about, labels=[*self._names, "source"])
        drafted: dict[tuple[str, ...], float] = {}
        accepted: dict[tuple[str, ...], float] = {}
        for name, split in splits.items():
            rates.add_metric([*self._values, name], split.draft_acceptance_rate)
            for position, count in enumerate(list(split.draft_tokens_per_position)):
                drafted[name, str(position)] = count
            for position, count in enumerate(list(split.accepted_per_position)):
                accepted[name, str(position)] = count
        yield rates
        labels = ("source", "position")
        yield self._counter("outrider_draft_tokens", "Verified.", drafted, *labels)
        yield self._counter("outrider_accepted_draft_tokens", "Kept.", accepted, *labels)

    def _health(self, engine: Engine) -> Iterator[Metric]:
        guard = engine.speculation.guard
        about = "Faults of draft sources, by what was asked of them."
        failures = dict(guard.failures)
        yield self._counter("outrider_source_failures", about, failures, "source", "what")
        about = "Share of the calls of a source that went well lately."
        health = GaugeMetricFamily("outrider_source_health", about, labels=[*self._names, "source"])
        for name, share in dict(guard.health).items():
            health.add_metric([*self._values, name], share)
        yield health

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, about, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(
        self, name: str, about: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> Metric:
        family = CounterMetricFamily(name, about, labels=[*self._names, *labels])
        for key, value in values.items():
            family.add_metric([*self._values, *key], value)
        return family
