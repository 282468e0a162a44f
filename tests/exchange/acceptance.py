"""How much of a drafter's drafts is accepted: counted by vLLM, and worked out here.

    python tests/exchange/acceptance.py DRAFTER... [--prompts FILE.jsonl] [--count 20]

prints both for drafters of the demo target, each exported and served by vLLM's CPU build, in
float32, as JSON lines. Greedy drafts change no text, so what is accepted follows from the target's
text alone: at each step, the drafts that say what the text says next.
"""

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exchange_peers import VLLM, peer_python
from transformers import AutoModelForCausalLM

from outrider.bench.peers.install import runtime_environment
from outrider.bench.peers.models import model_directory
from outrider.bench.workload import read_workload
from outrider.checkpoints import export_drafter, load_drafter
from outrider.drafters import Drafter
from outrider.drafters.base import Texts
from outrider.tokenizer import Tokenizer

MOST_PROMPT_TOKENS = 384  # of the context of 512 that run_vllm_drafter.py asks for
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
}


@dataclass(slots=True)
class Counts:
    """Drafts, and how many tokens of them were accepted, in all and at each position."""

    drafts: int
    accepted: int
    per_position: list[int]

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / max(1, self.drafts)


class ExchangeTarget:
    """The demo target as a directory of Hugging Face's, in float32."""

    def __init__(self) -> None:
        self.directory = model_directory(None)
        self.model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        self.weights = self.model.state_dict()
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights["lm_head.weight"]

    @torch.no_grad()
    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy text, whatever token comes."""
        given = torch.tensor([prompt])
        self.model.generation_config.eos_token_id = None
        found = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return found[0, len(prompt) :].tolist()

    @torch.no_grad()
    def texts(self, token_ids: list[int], layer_ids: tuple[int, ...]) -> Texts:
        ids = torch.tensor(token_ids)
        states = self.model(ids[None], output_hidden_states=True).hidden_states
        features = torch.cat([states[i + 1][0] for i in layer_ids], dim=-1)  # [T, F]
        return Texts(ids, [0, len(ids)], features)


def worked_out(
    target: ExchangeTarget, drafter: Drafter, prompt: list[int], answer: list[int], max_tokens: int
) -> Counts:
    """What greedy drafting of `max_tokens` gains; the answer is longer by a draft and one more."""
    depths = drafter.config.num_draft_tokens
    assert len(answer) > max_tokens + depths
    texts = target.texts([*prompt, *answer], drafter.config.target_layer_ids)
    anchors = torch.arange(len(prompt), len(prompt) + max_tokens)
    with torch.no_grad():
        found = drafter.guess(texts, anchors, torch.full_like(anchors, depths))
    right = torch.zeros(max_tokens, depths, dtype=torch.long)
    said = drafter.d2t[found.logits.argmax(-1)] == texts.token_ids[found.places]
    right[found.anchors - len(prompt), found.depths] = said.long()
    runs = right.cumprod(1).sum(1).tolist()
    counts, at = Counts(0, 0, [0] * depths), 0
    while at + 1 < max_tokens:  # the first token comes with the prompt
        counts.drafts += 1
        counts.accepted += runs[at]
        for depth in range(runs[at]):
            counts.per_position[depth] += 1
        at += runs[at] + 1
    return counts


def added(every: list[Counts]) -> Counts:
    positions = [sum(column) for column in zip(*(c.per_position for c in every), strict=True)]
    return Counts(sum(c.drafts for c in every), sum(c.accepted for c in every), positions)


def export(target: ExchangeTarget, drafter: Drafter, directory: Path) -> None:
    export_drafter(
        drafter,
        directory,
        "speculators",
        target_config=target.model.config,
        target_weights=target.weights,
        target_name=str(target.directory),
    )


def served(
    target: ExchangeTarget,
    drafter: Drafter,
    prompts: list[list[int]],
    max_tokens: int,
    num_threads: int = 1,  # of two on a busy machine, each waits for the other
) -> tuple[list[list[int]], Counts]:
    """Answers of vLLM with the drafter exported to it, and its counts."""
    config = drafter.config
    with tempfile.TemporaryDirectory() as work:
        directory, result = Path(work) / "drafter", Path(work) / "result.json"
        export(target, drafter, directory)
        job = {
            "target": str(target.directory),
            "prompts": prompts,
            "max_tokens": max_tokens,
            "result": str(result),
            "speculative_config": METHODS[config.algorithm]
            | {"model": str(directory), "num_speculative_tokens": config.num_draft_tokens},
        }
        path = Path(work) / "job.json"
        path.write_text(json.dumps(job))
        script = Path(__file__).with_name("run_vllm_drafter.py")
        done = subprocess.run(
            [str(peer_python(VLLM)), str(script), str(path)],
            env=os.environ | runtime_environment(VLLM, num_threads),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(result.read_text())
    counts = found["counts"]
    per_position = [int(n) for n in counts["accepted_tokens_per_pos"]]
    return found["token_ids"], Counts(
        int(counts["drafts"]), int(counts["accepted_tokens"]), per_position
    )


def chosen_prompts(target: ExchangeTarget, path: Path | None, count: int) -> list[list[int]]:
    """Token ids of the first turns of a workload, those that leave room in vLLM's context."""
    tokenizer = Tokenizer.from_directory(target.directory)
    workload = read_workload([path] if path else [], limit=count)
    texts = [tokenizer.chat(prompt.conversation) for prompt in workload.prompts]
    every = [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return [ids for ids in every if len(ids) <= MOST_PROMPT_TOKENS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafters", nargs="+", type=Path)
    parser.add_argument("--prompts", type=Path, help="a workload; else that of the benchmark")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    target = ExchangeTarget()
    prompts = chosen_prompts(target, options.prompts, options.count)
    for path in options.drafters:
        drafter = load_drafter(path).drafter.float()
        drafter.attach(target.embedding, target.head)
        texts, theirs = served(target, drafter, prompts, options.max_tokens)
        room = options.max_tokens + drafter.config.num_draft_tokens + 1
        answers = [target.answer(prompt, room) for prompt in prompts]
        # Where rounding makes vLLM's text another one, the two would be about different texts.
        same = [i for i, text in enumerate(texts) if text == answers[i][: len(text)]]
        pairs = zip(prompts, answers, strict=True)
        ours = added([worked_out(target, drafter, *pair, options.max_tokens) for pair in pairs])
        line = {
            "drafter": str(path),
            "algorithm": drafter.config.algorithm,
            "prompts": len(prompts),
            "same text": len(same),
            "vLLM": round(theirs.acceptance_length, 4),
            "here": round(ours.acceptance_length, 4),
            "vLLM per position": theirs.per_position,
            "here per position": ours.per_position,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
