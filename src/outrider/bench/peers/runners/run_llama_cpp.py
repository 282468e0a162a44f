"""llama.cpp through llama-cpp-python, one request at a time, on the GGUF file of the job."""

# pyright: reportMissingImports=false
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Decode, serve


def load(job: dict[str, Any]) -> Decode:
    lookup = job["options"].get("prompt_lookup")
    llama = Llama(
        job["model"],
        n_ctx=job["max_model_len"],
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        draft_model=None if lookup is None else LlamaPromptLookupDecoding(**lookup),
        # Its prompt lookup reads the logits of every position; plain decoding does not need them.
        logits_all=lookup is not None,
        flash_attn=True,
        verbose=False,
    )
    end = llama.token_eos()

    def decode(prompts: Any, max_tokens: int, ignore_eos: bool) -> list[list[int]]:
        answers: list[list[int]] = []
        for prompt in prompts:
            llama.reset()  # a prompt is new to everybody in every round
            answer: list[int] = []
            for token in llama.generate(prompt, top_k=1, temp=0.0):
                if token == end and not ignore_eos:
                    break
                answer.append(token)
                if len(answer) == max_tokens:
                    break
            answers.append(answer)
        return answers

    return decode


if __name__ == "__main__":
    serve(load, ("llama-cpp-python",))
