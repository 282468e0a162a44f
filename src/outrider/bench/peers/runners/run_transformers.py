"""transformers' `generate`, plain or with the keyword arguments of the job."""

# pyright: reportMissingImports=false
from typing import Any

import torch
from protocol import Decode, serve, until_end
from transformers import AutoModelForCausalLM

PAD = 0


def load(job: dict[str, Any]) -> Decode:
    torch.set_num_threads(job["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    settings = job["options"]["generate"]

    @torch.inference_mode()
    def decode(prompts: Any, max_tokens: int, ignore_eos: bool) -> list[list[int]]:
        width = max(map(len, prompts))
        rows = [[PAD] * (width - len(ids)) + ids for ids in prompts]  # padded on the left
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        output = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None if ignore_eos else ends,
            pad_token_id=PAD,
            **settings,
        )
        answers = [row.tolist() for row in output[:, width:]]
        return answers if ignore_eos else [until_end(ids, ends) for ids in answers]

    return decode


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
