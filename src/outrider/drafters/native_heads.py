"""What a drafter computes around its layers, compiled: inputs, Medusa's and DSpark's heads.

Without the compiled kernels both do the same in torch.

Shape legend: R rows, A chains, I inputs, O outputs, H hidden, L heads, V vocabulary of the target,
U of the drafter, r rank of the sequential head.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from outrider.drafters.base import Drafter
from outrider.drafters.dspark import DSpark, MarkovHead
from outrider.drafters.medusa import Medusa
from outrider.native import library, pointer
from outrider.target.native_model import KINDS, TILE

MOST_PARTS = 2  # kParts of native/heads.h

_P = ctypes.c_void_p


class FuseJob(ctypes.Structure):  # of native/heads.h
    _fields_ = (
        *((name, ctypes.c_int) for name in ("rows", "parts", "outputs", "is_bf16")),
        ("epsilon", ctypes.c_float),
        ("widths", ctypes.c_int * MOST_PARTS),
        ("x", _P * MOST_PARTS),
        ("norms", _P * MOST_PARTS),
        *((name, _P) for name in ("weights", "bias", "last_norm", "out")),
    )


class MarkovJob(ctypes.Structure):  # of native/heads.h
    _fields_ = (
        *((name, ctypes.c_int) for name in ("chains", "columns", "rank", "is_bf16")),
        *(
            (name, _P)
            for name in ("starts", "before", "ids", "w1", "w2", "logits", "tokens", "probs")
        ),
    )


class PackedLinear:
    """A linear layer over one or two inputs side by side, with RMS norms before and after it.

    A row's results have the same bits whatever shares the call.

    Args:
        weight: [O, I].
        dtype: of weight and inputs in the product, bfloat16 or float32.
        norms: of each input, the weight [width] of its norm, or None.
        bias: [O].
        last_norm: [O], weight of a norm of the results.
        epsilon: of all norms.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        dtype: torch.dtype,
        norms: Sequence[torch.Tensor | None] = (None,),
        bias: torch.Tensor | None = None,
        last_norm: torch.Tensor | None = None,
        epsilon: float = 1e-5,
    ) -> None:
        outputs, inputs = weight.shape
        self._widths = [inputs // len(norms)] * len(norms)
        self._epsilon = epsilon
        self._norms, self._bias = [_vector(norm) for norm in norms], _vector(bias)
        self._last_norm = _vector(last_norm)
        is_odd = any(w % TILE for w in self._widths) or (last_norm is not None and outputs % TILE)
        self._lib = None if is_odd or weight.device.type != "cpu" else library()
        self._weight = weight.detach().to(dtype)
        self.job: FuseJob | None = None  # what a call is made of, without its rows
        if self._lib is None:
            return
        self._weight = _packed(self._lib, self._weight)
        self.job = FuseJob(
            parts=len(norms),
            outputs=outputs,
            is_bf16=dtype == torch.bfloat16,
            epsilon=epsilon,
            widths=tuple(self._widths),
            norms=tuple(None if norm is None else norm.data_ptr() for norm in self._norms),
            weights=pointer(self._weight),
            bias=pointer(self._bias),
            last_norm=pointer(self._last_norm),
        )

    def __call__(self, *parts: torch.Tensor) -> torch.Tensor:
        """Rows [R, width] of each input to float32 [R, O]."""
        assert [part.shape[1] for part in parts] == self._widths, self._widths
        if self._lib is None or self.job is None:
            return self._in_torch(parts)
        rows = [part.detach().float().contiguous() for part in parts]
        out = torch.empty(len(rows[0]), self.job.outputs)
        self.job.rows = len(out)
        self.job.x = tuple(part.data_ptr() for part in rows)
        self.job.out = out.data_ptr()
        self._lib.outrider_fuse(ctypes.byref(self.job))
        return out

    def _in_torch(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = [self._normed(x.float(), w) for x, w in zip(parts, self._norms, strict=True)]
        out = F.linear(torch.cat(rows, dim=-1).to(self._weight.dtype), self._weight).float()
        return self._normed(out if self._bias is None else out + self._bias, self._last_norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, self._epsilon)


def input_projection(drafter: Drafter, dtype: torch.dtype) -> PackedLinear | None:
    """What makes the input of the layers, with its norms; None where there is no such layer.

    Of features [R, F] for those with an ``fc``; of embeddings [R, H] and states [R, H] for MTP.
    """
    parts: Any = drafter
    epsilon = drafter.config.norm_epsilon
    if hasattr(parts, "joins"):
        join = parts.joins[0]
        norms = join.enorm.weight, join.hnorm.weight
        return PackedLinear(join.eh_proj.weight, dtype, norms, epsilon=epsilon)
    if not hasattr(parts, "fc"):
        return None
    norm = parts.fc_norm.weight if hasattr(parts, "fc_norm") else None
    last = parts.hidden_norm.weight if hasattr(parts, "hidden_norm") else None
    return PackedLinear(parts.fc.weight, dtype, (norm,), last_norm=last, epsilon=epsilon)


class MedusaHeads:
    """All heads of Medusa and the target's head behind them, in a call or two."""

    def __init__(self, drafter: Medusa, dtype: torch.dtype) -> None:
        heads: Any = drafter.heads
        first = [head[0] for head in heads]
        self._first = PackedLinear(
            torch.cat([block.weight for block in first]),
            dtype,
            bias=torch.cat([block.bias for block in first]),
        )
        self._others = [
            [PackedLinear(block.weight, dtype, bias=block.bias) for block in head[1:]]
            for head in heads
        ]
        norm = drafter.norm
        self._logits = PackedLinear(drafter.head, dtype, (norm.weight,), epsilon=norm.epsilon)

    def logits(self, features: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Of the first `counts[i]` heads on features [R, H]: float32 [sum of counts, U]."""
        added = F.silu(self._first(features)).unflatten(1, (len(self._others), -1))  # [R, L, H]
        states = features.float()[:, None] + added
        for depth, blocks in enumerate(self._others):
            for block in blocks:
                states[:, depth] += F.silu(block(states[:, depth]))
        kept = torch.cat([row[:count] for row, count in zip(states, counts, strict=True)])
        return self._logits(kept)


class Confidence:
    """DSpark's confidence head: what a state says of it, and what the token before says.

    The second is a number per token of the vocabulary, worked out once.
    """

    def __init__(self, drafter: DSpark, dtype: torch.dtype) -> None:
        head, norm = drafter.confidence_head, drafter.norm
        assert head is not None
        weight, hidden = head.proj.weight, drafter.config.hidden_size
        of_state, of_token = weight[:, :hidden], weight[0, hidden:]
        self.of_state = PackedLinear(
            of_state, dtype, (norm.weight,), head.proj.bias, epsilon=norm.epsilon
        )
        self.of_token: np.ndarray | None = None  # float32 [V]
        if len(of_token) and drafter.markov_head is not None:
            words = drafter.markov_head.markov_w1.weight
            self.of_token = (words.float() @ of_token.float()).detach().cpu().numpy()

    def __call__(self, states: torch.Tensor, before: np.ndarray) -> list[float]:
        """Logits of acceptance, from states before the last norm [R, H] and ids before [R]."""
        logits = self.of_state(states)[:, 0].numpy()
        return (logits if self.of_token is None else logits + self.of_token[before]).tolist()


class MarkovChains:
    """DSpark's sequential head of the kind "vanilla", slot by slot over the logits of blocks.

    Args:
        head: its parameters.
        d2t: int64 [U], the target's id of each column.
        dtype: of its matrices, bfloat16 or float32.
    """

    def __init__(self, head: MarkovHead, d2t: torch.Tensor, dtype: torch.dtype) -> None:
        assert head.kind == "vanilla", head.kind
        w1, w2 = head.markov_w1.weight, head.markov_w2.weight
        self._lib = None if w1.device.type != "cpu" else library()
        padding = (0, 0 if self._lib is None else w1.shape[1] % 2)  # kernels take pairs
        self._w1, self._w2 = (F.pad(w.detach().to(dtype), padding) for w in (w1, w2))
        self._rank, self._columns = self._w1.shape[1], len(w2)
        self._ids = d2t.cpu().numpy().astype(np.int32)
        self.job: MarkovJob | None = None  # what a call is made of, without its rows
        if self._lib is None:
            return
        self._w2 = _packed(self._lib, self._w2)
        self.job = MarkovJob(
            columns=self._columns,
            rank=self._rank,
            is_bf16=dtype == torch.bfloat16,
            ids=pointer(self._ids),
            w1=pointer(self._w1),
            w2=pointer(self._w2),
        )

    def greedy(
        self, logits: torch.Tensor, counts: Sequence[int], anchors: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The most likely tokens of chains, each slot with the bias of the token before it.

        Args:
            logits: float32 [R, U] without the bias, chain after chain; they stay as they are.
            counts: slots of each chain, from 1 on.
            anchors: int32 [A], the token before the first slot of each.

        Returns:
            the target's ids, int32 [R], and their probabilities at temperature 1, float32 [R].
        """
        tokens, probs = np.empty(len(logits), np.int32), np.empty(len(logits), np.float32)
        starts = np.cumsum([0, *counts], dtype=np.int32)
        assert starts[-1] == len(logits), (counts, len(logits))
        if self._lib is None:
            self._greedy_in_torch(logits, starts, anchors, tokens, probs)
        else:
            job, _arrays = self._set(logits, starts, anchors, tokens=tokens, probs=probs)
            self._lib.outrider_markov_choose(job)
        return tokens, probs

    def add_bias(self, logits: torch.Tensor, before: np.ndarray) -> None:
        """Add to logits, float32 [A, U], the bias of the tokens before, int32 [A]."""
        if self._lib is None:
            logits += self._bias(before)
            return
        starts = np.arange(len(logits) + 1, dtype=np.int32)
        job, _arrays = self._set(logits, starts, before)
        self._lib.outrider_markov_add(job)

    def _set(
        self, logits: torch.Tensor, starts: np.ndarray, before: np.ndarray, **out: np.ndarray
    ) -> tuple[Any, list[Any]]:
        """The job of a call, and what it points into."""
        assert logits.is_contiguous() and logits.dtype == torch.float32, logits.dtype
        assert logits.shape[1] == self._columns and len(before) == len(starts) - 1
        before = np.ascontiguousarray(before, np.int32)
        assert before.min() >= 0 and before.max() < len(self._w1), before
        assert self.job is not None
        self.job.chains = len(before)
        arrays = {"starts": starts, "before": before, "logits": logits, **out}
        for name, array in arrays.items():
            setattr(self.job, name, pointer(array))
        return ctypes.byref(self.job), list(arrays.values())

    def _greedy_in_torch(
        self,
        logits: torch.Tensor,
        starts: np.ndarray,
        anchors: np.ndarray,
        tokens: np.ndarray,
        probs: np.ndarray,
    ) -> None:
        counts, before = np.diff(starts), np.asarray(anchors)
        for step in range(int(counts.max())):
            before = before[counts[counts >= step] > step] if step else before
            rows = starts[:-1][counts > step] + step
            biased = logits[torch.from_numpy(rows.astype(np.int64))] + self._bias(before)
            best = biased.argmax(1)
            before = tokens[rows] = self._ids[best.cpu().numpy()]
            chosen = biased.softmax(1).gather(1, best[:, None])[:, 0]
            probs[rows] = chosen.cpu().numpy()

    def _bias(self, before: np.ndarray) -> torch.Tensor:
        rows = torch.from_numpy(before.astype(np.int64)).to(self._w1.device)
        return F.linear(self._w1[rows], self._w2).float()


def _vector(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _packed(lib: ctypes.CDLL, weight: torch.Tensor) -> torch.Tensor:
    """Weights [O, I] of bfloat16 or float32 in the tiles of native/multiply.h."""
    assert weight.dtype in KINDS, weight.dtype  # another one would be read beyond its end
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    tiles = -(-outputs // TILE)
    packed = torch.empty(tiles * TILE * inputs, dtype=weight.dtype)
    is_bf16 = int(weight.dtype == torch.bfloat16)
    lib.outrider_pack(
        *(pointer(packed), is_bf16, pointer(weight), is_bf16, outputs, inputs, 0, 1, tiles)
    )
    return packed
