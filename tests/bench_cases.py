"""A model of letters and prompts for it, to try the bench on."""

from typing import Any

from fakes import ALPHABET, FakeTarget, FakeTokenizer

from outrider import LLM
from outrider.bench.workload import BenchPrompt, Workload


class AnyText(FakeTokenizer):
    """Leaves out what it has no token for."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode("".join(c for c in text.lower() if c.encode() in self.pieces))


TOKENIZER = AnyText(ALPHABET.pieces, special=[0])


def toy_llm(**options: Any) -> LLM:
    defaults = {"kv_cache_tokens": 4096, "max_num_seqs": 4, "speculative_config": None}
    target = FakeTarget(vocab_size=39, max_model_len=512)
    return LLM(target=target, tokenizer=TOKENIZER, **defaults | options)


def toy_workload(*texts: str) -> Workload:
    prompts = [
        BenchPrompt("even" if i % 2 == 0 else "odd", ({"role": "user", "content": text},))
        for i, text in enumerate(texts)
    ]
    return Workload(prompts)
