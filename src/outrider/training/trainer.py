"""The loop: steps over packs, losses at the anchors, an optimiser, checkpoints that resume exactly.

Runs in one process or in several under torchrun. Gradients are those of sums; sums and weights are
added over all processes before they are divided, so the number of processes changes no loss.
"""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from outrider.checks import integer
from outrider.drafters import Drafter
from outrider.errors import TrainingError
from outrider.training.batches import Batches, Pack, Place
from outrider.training.dataset import difference
from outrider.training.losses import Losses, LossWeights, Wanted, head_losses
from outrider.training.optimizers import make_optimizers, share_of_rate
from outrider.training.recipe import Recipe


@dataclass(slots=True)
class Report:
    """What a stretch of steps came to; means over its guesses."""

    step: int
    loss: float
    terms: dict[str, float]
    agreement: list[float]  # per depth: the drafter's best token is the target's
    acceptance: list[float]  # per depth: 1 - total variation
    gradient_norm: float
    learning_rate: float
    seconds: float
    num_tokens: int  # context tokens seen, from the start of training
    num_guesses: int
    num_new_tokens: int  # of these since the last report

    @property
    def tokens_per_second(self) -> float:
        return self.num_new_tokens / max(1e-9, self.seconds)


@dataclass(slots=True)
class _Sums:
    """Of one step, in one process; then of all."""

    by_depth: torch.Tensor  # [3, K]: agreements, acceptance, guesses
    loss: float = 0.0
    weight: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    gradient_norm: float = 0.0
    seconds: float = 0.0


class Trainer:
    """Trains one drafter by a recipe.

    Args:
        batches: what each step sees.
        directory: of the run, for messages.
        rank, world: this process among all.
    """

    def __init__(
        self,
        drafter: Drafter,
        recipe: Recipe,
        batches: Batches,
        directory: Path,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.drafter = drafter
        self.recipe = recipe
        self.directory = directory
        self.step = 0
        self.num_tokens = 0
        self._batches, self._rank, self._world = batches, rank, world
        self._device = drafter.d2t.device
        self._t2d = token_map(drafter)
        self._pending: list[_Sums] = []  # steps that no report has told of yet
        self._optimizers = make_optimizers(drafter, recipe.training)
        self._parameters = [p for p in drafter.parameters() if p.requires_grad]

    @property
    def num_steps(self) -> int:
        return self.recipe.training.steps

    def advance(self) -> None:
        """Make one step.

        Raises:
            TrainingError: a loss or a gradient that is no number; the message names the texts of
                the step. The parameters are those before it.
        """
        start = time.perf_counter()
        self.drafter.train()
        sums = _Sums(torch.zeros(3, self.drafter.config.num_draft_tokens, device=self._device))
        places: list[Place] = []
        for pack in self._batches.step(self.step, self._rank, self._world):
            places += pack.places
            sums.tokens += len(pack.texts.token_ids)
            pack = pack.to(self._device, self.drafter.head.dtype)
            for part in pack.partitions(self.recipe.training.partitions):
                self._backward(part, sums)
        self._add_processes(sums)
        if not math.isfinite(sums.loss):
            raise TrainingError(self._failure("loss", sums.loss, places))
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= max(sums.weight, 1e-9)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.recipe.training.clip)
        sums.gradient_norm = float(norm)
        if not math.isfinite(sums.gradient_norm):
            raise TrainingError(self._failure("gradient", sums.gradient_norm, places))
        share = share_of_rate(self.step, self.recipe.training)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group["peak"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.num_tokens += sums.tokens
        sums.seconds = time.perf_counter() - start
        self._pending.append(sums)

    def _failure(self, what: str, value: float, places: list[Place]) -> str:
        named = [f"shard {place.shard} text {place.index}" for place in places[:8]]
        return (
            f"the {what} of step {self.step} is {value}; its texts are {', '.join(named)}"
            f"{' …' if len(places) > 8 else ''}"
        )

    def _backward(self, pack: Pack, sums: _Sums) -> None:
        """Add the gradients of one pack's summed loss."""
        weights = self.recipe.loss
        with self._device, autocast(self._device, self.recipe.training.precision):
            guesses = self.drafter.guess(pack.texts, pack.anchors, pack.lengths)
        shares = weights.shares(guesses.depths)
        wanted = wanted_at(self.drafter, self._t2d, pack, guesses.places)
        found, head = head_losses(guesses.parts, wanted, weights, shares)
        ends, slopes = [], []
        for (states, weight), of_states, of_weight in zip(
            guesses.parts, head.states, head.weights, strict=True
        ):
            ends.append(states)
            slopes.append(of_states)
            if of_weight is not None:
                ends.append(weight)
                slopes.append(of_weight)
        if guesses.confidence is not None:
            sure = F.binary_cross_entropy_with_logits(
                guesses.confidence.float(), found.acceptance.clamp(0, 1), reduction="none"
            )
            found.terms["confidence"] = sure.detach()
            ends.append((shares * weights.confidence * sure).sum())
            slopes.append(torch.ones((), device=self._device))
        torch.autograd.backward(ends, slopes)
        _add(sums, found, shares, guesses.depths, weights)

    def _add_processes(self, sums: _Sums) -> None:
        """Make sums and gradients those of all processes."""
        if self._world == 1:
            return
        names = sorted(sums.terms)
        numbers = [sums.loss, sums.weight, float(sums.tokens), *(sums.terms[n] for n in names)]
        flat = torch.cat(
            [
                torch.tensor(numbers, dtype=torch.float64, device=self._device),
                sums.by_depth.flatten().double(),
            ]
        )
        dist.all_reduce(flat)
        sums.loss, sums.weight, sums.tokens = float(flat[0]), float(flat[1]), int(flat[2])
        sums.terms = {name: float(flat[3 + i]) for i, name in enumerate(names)}
        sums.by_depth = flat[len(numbers) :].view_as(sums.by_depth).float()
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def report(self) -> Report:
        """Means over the steps since the last report; there must be one at least."""
        pending, self._pending = self._pending, []
        weight = sum(sums.weight for sums in pending)
        by_depth = torch.stack([sums.by_depth for sums in pending]).sum(0)
        means = by_depth[:2] / by_depth[2].clamp(min=1)
        names = pending[0].terms
        return Report(
            step=self.step,
            loss=sum(sums.loss for sums in pending) / weight,
            terms={n: sum(sums.terms[n] for sums in pending) / weight for n in names},
            agreement=means[0].tolist(),
            acceptance=means[1].tolist(),
            gradient_norm=sum(sums.gradient_norm for sums in pending) / len(pending),
            learning_rate=self._optimizers[0].param_groups[0]["lr"],
            seconds=sum(sums.seconds for sums in pending),
            num_tokens=self.num_tokens,
            num_guesses=int(by_depth[2].sum()),
            num_new_tokens=sum(sums.tokens for sums in pending),
        )

    def state(self) -> dict[str, Any]:
        """Everything a resume needs."""
        return {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "recipe": self.recipe.as_json(),
            "drafter": self.drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "pending": [asdict(sums) for sums in self._pending],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            TrainingError: it is of another recipe, or no state at all.
        """
        try:
            self._load(state)
        except TrainingError:
            raise
        except Exception as error:  # of whatever a foreign file holds
            raise TrainingError(
                f"the state in {self.directory} is none of a run, or damaged: "
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        if state["recipe"] != self.recipe.as_json():
            raise TrainingError(
                f"{self.directory} holds a run of another recipe; give another directory, or "
                f"delete it: {difference(state['recipe'], self.recipe.as_json())}"
            )
        self.drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = integer("its step", state["step"], 0, self.num_steps)
        self.num_tokens = integer("its num_tokens", state["num_tokens"], 0)
        self._pending = [_Sums(**sums) for sums in state["pending"]]
        for sums in self._pending:
            sums.by_depth = sums.by_depth.to(self._device)


def autocast(device: torch.device, precision: str) -> Any:
    """Products in bf16 where the recipe says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def wanted_at(drafter: Drafter, t2d: torch.Tensor, pack: Pack, places: torch.Tensor) -> Wanted:
    """What the target says at the tokens `places` [R]."""
    before, which = torch.unique(places - 1, return_inverse=True)
    return Wanted(
        logits=pack.features.last[before].to(drafter.head.dtype) @ drafter.head.T,
        log_sums=pack.features.log_sums[before],
        places=which,
        labels=t2d[pack.texts.token_ids[places]],
        best=t2d[pack.features.best[places - 1].long()],
    )


def token_map(drafter: Drafter) -> torch.Tensor:
    """Place of each target token in the drafter's vocabulary, int64 [V]; -1: not in it."""
    t2d = torch.full((drafter.config.vocab_size,), -1, device=drafter.d2t.device)
    t2d[drafter.d2t] = torch.arange(len(drafter.d2t), device=t2d.device)
    return t2d


def _add(
    sums: _Sums, found: Losses, shares: torch.Tensor, depths: torch.Tensor, weights: LossWeights
) -> None:
    for name, term in found.terms.items():
        value = float((shares * term).sum())
        sums.terms[name] = sums.terms.get(name, 0.0) + value
        sums.loss += getattr(weights, name) * value
    sums.weight += float(shares.sum())
    sums.by_depth[0].index_add_(0, depths, found.agrees.float())
    sums.by_depth[1].index_add_(0, depths, found.acceptance)
    sums.by_depth[2].index_add_(0, depths, torch.ones_like(found.acceptance))
