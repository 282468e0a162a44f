"""Optimisers and the course of the learning rate."""

import math

import torch

from outrider.checks import shown
from outrider.drafters import Drafter
from outrider.errors import ConfigError
from outrider.training.recipe import Optimisation

OPTIMIZERS = ("adamw", "muon")


def make_optimizers(drafter: Drafter, settings: Optimisation) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices inside layers and AdamW for the rest.

    Raises:
        ConfigError: an unknown optimizer, or Muon for a drafter without such matrices.
    """
    if settings.optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer must be one of {list(OPTIMIZERS)}, got {shown(settings.optimizer)}"
        )
    matrices, others = [], []
    for name, parameter in drafter.named_parameters():
        inside = "layers." in name or name.startswith(("fc.", "joins."))
        is_matrix = settings.optimizer == "muon" and inside and parameter.dim() == 2
        (matrices if is_matrix else others).append(parameter)
    if settings.optimizer == "muon" and not matrices:
        raise ConfigError(
            f"optimizer muon is for matrices inside layers, and {drafter.config.algorithm} has "
            "none: expected adamw"
        )
    decay = settings.weight_decay
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            others, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=decay, fused=True
        )
    ]
    if matrices:
        rate = settings.matrix_learning_rate
        found.append(
            torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def share_of_rate(step: int, settings: Optimisation) -> float:
    """Linear warm-up, then a cosine to the final share."""
    warm = max(1, round(settings.warm_up * settings.steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, settings.steps - warm)
    final = settings.final_learning_rate
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))
