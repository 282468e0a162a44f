"""Runs in vLLM's environment: greedy answers in float32 with one drafter, and what it counted.

One argument, a JSON file: {"target": directory, "prompts": lists of token ids, "max_tokens",
"speculative_config": vLLM's or null, "result": file for {"token_ids", "counts"}}. The counts are
those of vLLM's own metrics, without their prefix; one per position is a list.
"""

# pyright: reportMissingImports=false
import json
import sys

PREFIX = "vllm:spec_decode_num_"


def main() -> None:
    from vllm import LLM, SamplingParams

    with open(sys.argv[1]) as file:
        job = json.load(file)
    llm = LLM(
        job["target"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=1,
        speculative_config=job["speculative_config"],
        enable_prefix_caching=False,
        enforce_eager=True,  # seconds to start in place of minutes
        disable_log_stats=False,
        seed=0,
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    inputs = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    counts = {
        metric.name.removeprefix(PREFIX): getattr(metric, "values", None)
        or getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if metric.name.startswith(PREFIX)
    }
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    with open(job["result"], "w") as file:
        json.dump({"token_ids": answers, "counts": counts}, file)


if __name__ == "__main__":
    main()
