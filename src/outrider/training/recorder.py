"""Keeps what the target computes while it answers: features that cost no forward of their own.

Shape legend: T tokens, F feature width, H hidden, V vocabulary.
"""

import torch
from torch.nn import functional as F

from outrider.drafters.native_heads import PackedLinear
from outrider.drafting.source import DraftContext, DraftSource
from outrider.target.load import LoadedModel
from outrider.training.dataset import Sample
from outrider.training.features import Features, check_layout

ROWS = 256  # whose logits are held at once


class Recorder(DraftSource):
    """A source that drafts nothing, and is told of every finished text.

    Args:
        layer_ids: layers whose outputs are kept; -1 = embedding.

    Raises:
        ModelError: as `check_layout`.
    """

    name = "recorder"
    max_draft_tokens = 0

    def __init__(self, loaded: LoadedModel, layer_ids: tuple[int, ...]) -> None:
        check_layout(loaded)
        weights = loaded.state_dict()
        self.layer_ids = layer_ids
        self.target_layer_ids = (*layer_ids, loaded.config["num_hidden_layers"] - 1)
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        self._head = PackedLinear(head, loaded.dtype)
        self._norm = weights["model.norm.weight"].float()
        self._epsilon: float = loaded.config["rms_norm_eps"]
        self._found: dict[bytes, torch.Tensor] = {}  # bf16 [T, F + H], the last state normed

    def finish(self, context: DraftContext) -> None:
        if context.features is None:
            return
        width = len(self._norm)
        states = context.features[:, -width:].float()
        last = F.rms_norm(states, (width,), self._norm, self._epsilon)
        whole = torch.cat([context.features[:, :-width].bfloat16(), last.bfloat16()], dim=1)
        self._found[context.token_ids.tobytes()] = whole

    def forget(self) -> None:
        """Drop all texts."""
        self._found.clear()

    def nothing(self) -> Features:
        """Of no token, for a shard without texts."""
        width = len(self._norm)
        layers = torch.zeros(0, len(self.layer_ids) * width, dtype=torch.bfloat16)
        none = torch.zeros(0)
        return Features(layers, layers.new_zeros(0, width), none, none.int())

    def features(self, sample: Sample, whole_text: bytes) -> Features | None:
        """Of a sample cut from a text, int32 ids as bytes; None: it came to no end here.

        The last token of a text has no features, for it was never run: they are zero.
        Distributions are worked out for the answer alone, where a drafter is trained. Texts that
        came more than once are one here.
        """
        states = self._found.get(whole_text)
        if states is None:
            return None
        length = len(sample.prompt_token_ids) + len(sample.token_ids)
        states = F.pad(states, (0, 0, 0, max(0, length - len(states))))[:length]
        width = len(self._norm)
        last = states[:, -width:]
        log_sums, best = torch.zeros(length), torch.zeros(length, dtype=torch.int32)
        for start in range(len(sample.prompt_token_ids) - 1, length, ROWS):
            rows = slice(start, start + ROWS)
            logits = self._head(last[rows])  # [<= ROWS, V]
            log_sums[rows], best[rows] = logits.logsumexp(-1), logits.argmax(-1).int()
        return Features(states[:, :-width], last, log_sums, best)
