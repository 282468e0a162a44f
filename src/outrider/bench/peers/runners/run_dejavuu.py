"""dejavuu on a model of transformers, bf16, with a drafter of the job or none."""

# pyright: reportMissingImports=false
from typing import Any

import torch
from dejavuu.core.engine import generate
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import make_drafter
from protocol import Decode, serve, until_end
from transformers import AutoConfig

NO_TOKEN = -1  # an end of text that never comes


def load(job: dict[str, Any]) -> Decode:
    torch.set_num_threads(job["threads"])
    options = job["options"]
    model = HFBackend(job["model"], device="cpu", dtype="bfloat16", attn_implementation="sdpa")
    ends = AutoConfig.from_pretrained(job["model"]).eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())

    @torch.inference_mode()
    def decode(prompts: Any, max_tokens: int, ignore_eos: bool) -> list[list[int]]:
        answers: list[list[int]] = []
        for prompt in prompts:
            # A drafter of its own for every prompt: no answer is there to be replayed.
            drafter = None if options["drafter"] is None else make_drafter(options["drafter"])
            end = NO_TOKEN if ignore_eos or not ends else ends[0]
            result = generate(
                model, prompt, max_tokens, drafter, eos=end, tree=options.get("tree", False)
            )
            answers.append(result.tokens if ignore_eos else until_end(result.tokens, ends))
        return answers

    return decode


if __name__ == "__main__":
    serve(load, ("dejavuu", "torch", "transformers"))
