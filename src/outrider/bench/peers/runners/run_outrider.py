"""outrider itself, as a runner beside its peers."""

# pyright: reportMissingImports=false
from itertools import count
from typing import Any

from protocol import Decode, serve

from outrider import LLM, SamplingParams


def load(job: dict[str, Any]) -> Decode:
    llm = LLM(
        job["model"],
        speculative_config=job["options"]["speculative_config"],
        num_threads=job["threads"],
        max_num_seqs=job["max_batch"],
        max_model_len=job["max_model_len"],
    )

    calls = count()

    def decode(prompts: Any, max_tokens: int, ignore_eos: bool) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            owner=str(next(calls)),  # no answer of an earlier call is there to be replayed
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        return [output.outputs[0].token_ids for output in outputs]

    return decode


if __name__ == "__main__":
    serve(load, ("outrider", "torch", "transformers"))
