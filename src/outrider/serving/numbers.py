"""What an answer cost: OpenAI's usage, and vLLM's block of metrics for a single request."""

from collections.abc import Sequence
from typing import Any

from outrider.results import RequestMetrics, RequestOutput, SpeculativeMetrics

MILLI = 1e3


def usage(
    results: Sequence[RequestOutput], predicting: Sequence[str], num_reasoning: int
) -> dict[str, Any]:
    """Tokens of all prompts and choices; `predicting` are the sources that draft predictions.

    Accepted prediction tokens were drafted from the prediction and kept, rejected ones were
    drafted from it and computed for nothing. `num_reasoning` output tokens were thoughts.
    """
    num_prompt = sum(len(result.prompt_token_ids) for result in results)
    num_output = sum(len(output.token_ids) for result in results for output in result.outputs)
    cached = sum(result.metrics.num_cached_tokens for result in results)
    told = [result.metrics.speculative_decoding for result in results]
    splits = [m.per_source[n] for m in told if m for n in predicting if n in m.per_source]
    accepted = sum(split.num_accepted_draft_tokens for split in splits)
    drafted = sum(split.num_draft_tokens for split in splits)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def request_metrics(results: Sequence[RequestOutput], num_spec_tokens: int) -> dict[str, Any]:
    """vLLM's `metrics`: times in milliseconds, None where several texts share the call.

    `num_spec_tokens` is the longest draft that any source may make.
    """
    if len(results) != 1 or len(results[0].outputs) != 1:
        return {"metrics": None}
    [result] = results
    found = _times(result.metrics, len(result.outputs[0].token_ids))
    told = result.metrics.speculative_decoding
    found["speculative_decoding"] = None if told is None else _acceptance(told, num_spec_tokens)
    return {"metrics": found}


def _times(metrics: RequestMetrics, num_tokens: int) -> dict[str, Any]:
    arrival, first, last = metrics.arrival_time, metrics.first_token_time, metrics.finished_time
    scheduled = arrival if metrics.scheduled_time is None else metrics.scheduled_time
    assert first is not None and last is not None, "an answer without its times"
    return {
        "time_to_first_token_ms": MILLI * (first - scheduled),
        "generation_time_ms": MILLI * (last - first),
        "queue_time_ms": MILLI * (scheduled - arrival),
        "mean_itl_ms": MILLI * (last - first) / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / max(1e-9, last - scheduled),
    }


def _acceptance(told: SpeculativeMetrics, num_spec_tokens: int) -> dict[str, Any]:
    histogram = told.acceptance_histogram
    longest = max(num_spec_tokens, *histogram) if histogram else num_spec_tokens
    return {
        "mean_acceptance_length": told.mean_acceptance_length,
        "draft_acceptance_rate": told.draft_acceptance_rate,
        "acceptance_histogram": [histogram.get(count, 0) for count in range(longest + 1)],
        "num_spec_steps": told.num_spec_steps,
        "num_accepted_draft_tokens": told.num_accepted_draft_tokens,
        "num_draft_tokens": told.num_draft_tokens,
        "num_spec_tokens": num_spec_tokens,
    }
