"""Cost curves of models that are not at hand: random weights, acceptance that is forced.

Nothing here says how well a drafter guesses: acceptance is an input. What is measured is what
verification costs a model of this size on this machine, and so what an acceptance would bring.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.drafting.scripted import ScriptedSource
from outrider.drafting.source import Draft, DraftContext
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.target.base import Target

LABEL = "SPEED ONLY: random weights, forced acceptance"
FORCED = "forced"  # name of the source and of its config
MAX_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-type decoder with tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    max_model_len: int = MAX_MODEL_LEN

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.max_model_len,
            tie_word_embeddings=True,
        )

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes by Hugging Face name."""
        head = self.hidden // self.heads
        wide = {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (self.kv_heads * head, self.hidden),
            "self_attn.v_proj": (self.kv_heads * head, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        norms = {"input_layernorm": (self.hidden,), "post_attention_layernorm": (self.hidden,)}
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        for layer in range(self.layers):
            for name, shape in (wide | norms).items():
                shapes[f"model.layers.{layer}.{name}.weight"] = shape
        return shapes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weights().values())


# The first two are SmolLM2's, the others Llama 3's (8b with tied embeddings).
SIZES = {
    "135m": Shape(576, 1536, 30, 9, 3, 49152),
    "360m": Shape(960, 2560, 32, 15, 5, 49152),
    "1b": Shape(2048, 8192, 16, 32, 8, 128256),
    "3b": Shape(3072, 8192, 28, 24, 8, 128256),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
}


def unsigned(seed: int) -> int:
    """A seed of 64 bits for generators that take none below zero."""
    return seed % 2**64


class RandomWeights(Mapping[str, torch.Tensor]):
    """Weights made when they are asked for: a large model then never lies in memory twice."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int) -> None:
        self._shapes = shape.weights()
        self._dtype = dtype
        generator = torch.Generator().manual_seed(unsigned(seed))
        # One block, read from another place for every tensor: noise for billions of weights
        # would take minutes, and no kernel is faster on numbers that come again.
        self._block = (0.02 * torch.randn(1 << 20, generator=generator)).to(dtype)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype)
        start = list(self._shapes).index(name) * 7919 % len(self._block)
        block = self._block.roll(-start)
        size = math.prod(shape)
        return block.repeat(-(-size // len(block)))[:size].view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def random_target(size: str | Shape, dtype: str, seed: int) -> "Target":
    """A target with random weights, in the compiled forward where there is one.

    Raises:
        ConfigError: an unknown size.
    """
    from outrider.target.load import resolve_dtype
    from outrider.target.model import TransformersTarget
    from outrider.target.native import NativeTarget, why_not_native

    if isinstance(size, str) and size not in SIZES:
        raise ConfigError(f"--speed-only must be one of {', '.join(SIZES)}, got {size!r}")
    shape = SIZES[size] if isinstance(size, str) else size
    name = f"random weights, {shape.num_parameters / 1e6:.0f} M parameters"
    kind = resolve_dtype(dtype, torch.device("cpu"))
    config, weights = shape.config(), RandomWeights(shape, kind, seed)
    if why_not_native(config) is None:
        return NativeTarget(config, weights, kind, shape.max_model_len, name)
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(config, dtype=kind)
    module.load_state_dict(dict(weights), strict=False)
    return TransformersTarget(module.eval(), None, name)


def random_prompts(
    vocab_size: int, count: int, num_tokens: int, seed: int
) -> list[tuple[int, list[int]]]:
    """(index, token ids) of prompts without meaning."""
    generator = np.random.default_rng(unsigned(seed))
    rows = generator.integers(0, vocab_size, (count, num_tokens)).tolist()
    return list(enumerate(rows))


class ForcedSource(ScriptedSource):
    """Drafts the known answer, with each token right at a given rate.

    Args:
        answers: plain output by prompt index, which is the request's id in a bench.
        acceptance_rate: chance of every token to be right, given that those before it were.
        num_draft_tokens: length of every draft.
        seed: which tokens are right, by prompt and position.
    """

    def __init__(
        self,
        answers: Mapping[int, list[int]],
        acceptance_rate: float,
        num_draft_tokens: int,
        seed: int,
    ) -> None:
        if not 0 <= acceptance_rate <= 1:
            raise ConfigError(f"a forced acceptance must be in [0, 1], got {acceptance_rate}")
        super().__init__(self._ahead, num_draft_tokens, name=FORCED)
        self._answers = answers
        self._rate = acceptance_rate
        self._right = {
            index: np.random.default_rng((unsigned(seed), index)).random(len(ids)) < acceptance_rate
            for index, ids in answers.items()
        }

    def _ahead(self, context: DraftContext) -> Draft | None:
        if not context.request_id.isdigit() or int(context.request_id) not in self._answers:
            return None
        index = int(context.request_id)
        start = len(context.token_ids) - context.num_prompt_tokens
        end = start + self.max_draft_tokens
        rest = self._answers[index][start:end]
        right = self._right[index][start:end]
        tokens = [t if good else _other(t) for t, good in zip(rest, right, strict=True)]
        return Draft(tokens, confidence=[self._rate] * len(tokens))


def _other(token_id: int) -> int:
    return token_id - 1 if token_id else 1
