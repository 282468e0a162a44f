"""OpenVINO GenAI: its pipeline with continuous batching, bf16, on the directory it converted."""

# pyright: reportMissingImports=false
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Decode, serve

CACHE_GIGABYTES = 2


def load(job: dict[str, Any]) -> Decode:
    lookup = job["options"].get("prompt_lookup")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIGABYTES
    scheduler.max_num_seqs = job["max_batch"]
    scheduler.enable_prefix_caching = False  # a prompt is new to everybody in every round
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "INFERENCE_NUM_THREADS": job["threads"],
    }
    if lookup is not None:
        properties["prompt_lookup"] = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)

    def settings(max_tokens: int, ignore_eos: bool) -> Any:
        config = pipeline.get_config()
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        config.do_sample = False
        if lookup is not None:
            config.num_assistant_tokens = lookup["num_assistant_tokens"]
            config.max_ngram_size = lookup["max_ngram_size"]
        return config

    def decode(prompts: Any, max_tokens: int, ignore_eos: bool) -> list[list[int]]:
        inputs = [openvino.Tensor(np.array([ids], np.int64)) for ids in prompts]
        each = [settings(max_tokens, ignore_eos) for _ in prompts]
        results = pipeline.generate(inputs, each)
        return [list(result.m_generation_ids[0]) for result in results]

    return decode


if __name__ == "__main__":
    serve(load, ("openvino-genai", "openvino"))
