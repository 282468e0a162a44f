"""A fresh drafter for a target: shape from the recipe, a vocabulary from the data, a good start."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outrider.checks import shown
from outrider.drafters import (
    ALGORITHMS,
    Drafter,
    DrafterConfig,
    check_layers_read,
    make_drafter,
)
from outrider.errors import ConfigError, ModelError
from outrider.training.dataset import Data
from outrider.training.recipe import DrafterShape, Recipe

EMBEDDING, LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"


def build_drafter(
    recipe: Recipe,
    data: Data,
    target_config: Any,
    weights: Mapping[str, torch.Tensor],
    mask_token_id: int | None,
    known_ids: torch.Tensor | None = None,
) -> Drafter:
    """A drafter with its first parameters, attached to the target's embedding and head.

    Args:
        known_ids: int64, tokens that it can name in any case.
        target_config: the target's Hugging Face configuration.
        weights: the target's tensors by Hugging Face name.

    Raises:
        ConfigError: the recipe's drafter does not fit together, or not to the target.
        ModelError: the target is not laid out as Llama is.
    """
    shape = recipe.drafter
    _check_shape(shape, mask_token_id)
    missing = [name for name in (EMBEDDING, LAST_NORM) if name not in weights]
    if missing:
        raise ModelError(f"drafters need a target laid out as Llama, this one has no {missing[0]}")
    vocab_size = target_config.vocab_size
    config = DrafterConfig(
        algorithm=shape.algorithm,
        hidden_size=target_config.hidden_size,
        intermediate_size=target_config.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=target_config.num_attention_heads,
        num_kv_heads=target_config.num_key_value_heads,
        head_dim=getattr(target_config, "head_dim", None)
        or target_config.hidden_size // target_config.num_attention_heads,
        vocab_size=vocab_size,
        draft_vocab_size=min(shape.draft_vocab_size, vocab_size),
        num_draft_tokens=shape.num_draft_tokens,
        target_hidden_size=target_config.hidden_size,
        target_num_layers=target_config.num_hidden_layers,
        target_layer_ids=shape.target_layer_ids,
        rope_theta=rope_theta(target_config),
        norm_epsilon=target_config.rms_norm_eps,
        max_position=target_config.max_position_embeddings,
        qk_norm=shape.qk_norm,
        mask_token_id=mask_token_id,
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.norm_before_fc,
        num_modules=shape.num_modules,
        markov_rank=shape.markov_rank,
        markov_head=shape.markov_head,
        confidence_head=shape.confidence_head,
    )
    torch.manual_seed(recipe.seed)
    check_layers_read(config)
    drafter = make_drafter(config)
    _start_small(drafter)
    _start_from_target(drafter, weights, shape.copy_layers)
    drafter.d2t = most_frequent(data, config.draft_vocab_size, vocab_size, known_ids)
    attach_target(drafter, weights, recipe.training.precision)
    return drafter


def attach_target(
    drafter: Drafter, weights: Mapping[str, torch.Tensor], precision: str = "bfloat16"
) -> None:
    """Give a drafter the target's embedding and head, in the precision of the products."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    embedding = weights[EMBEDDING].to(dtype)
    drafter.attach(embedding, weights.get("lm_head.weight", embedding).to(dtype))


def _check_shape(shape: DrafterShape, mask_token_id: int | None) -> None:
    kind = ALGORITHMS.get(shape.algorithm)
    if kind is None:
        return  # make_drafter says so
    every = {"algorithm", "target_layer_ids", "draft_vocab_size", "num_draft_tokens"}
    for each in dataclasses.fields(shape):
        value = getattr(shape, each.name)
        if each.name not in kind.shape_keys | every and value != each.default:
            raise ConfigError(
                f"{shape.algorithm} has no {each.name}, and the recipe says {shown(value)}: "
                f"expected {shown(each.default)}, or none; it has {sorted(kind.shape_keys)}"
            )
    if kind.needs_mask_token and mask_token_id is None:
        raise ConfigError(
            f"{shape.algorithm} needs mask_token: a token of the target that texts never hold"
        )


def rope_theta(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0)


def most_frequent(
    data: Data, count: int, vocab_size: int, known_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """The known ids and those most frequent in the answers, ascending: int64 [count]."""
    counts = np.zeros(vocab_size, np.int64)
    for shard in data.shards:
        for start, end, prompt in zip(
            shard.starts[:-1], shard.starts[1:], shard.prompt_lengths, strict=True
        ):
            np.add.at(counts, shard.token_ids[start + prompt : end], 1)
    if known_ids is not None:
        counts[known_ids.numpy()] += 1 + counts.max()
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def _start_small(drafter: Drafter) -> None:
    for name, parameter in drafter.named_parameters():
        if parameter.dim() >= 2 and not re.match(r"heads\.", name):
            torch.nn.init.normal_(parameter, std=0.02)
        if name == "markov_head.markov_w2.weight":
            torch.nn.init.zeros_(parameter)


def _start_from_target(
    drafter: Drafter, weights: Mapping[str, torch.Tensor], copy_layers: tuple[int, ...]
) -> None:
    """Copy the last norm, and for each of our layers the parameters of one of the target's."""
    with torch.no_grad():
        drafter.norm.weight.copy_(weights[LAST_NORM])
        if hasattr(drafter, "fc"):  # start with the deepest features as they are
            fc: torch.Tensor = drafter.fc.weight  # pyright: ignore
            fc[:, -len(fc) :] += torch.eye(len(fc))
        if not copy_layers:
            return
        layers = getattr(drafter, "layers", torch.nn.ModuleList())
        assert isinstance(layers, torch.nn.ModuleList)
        if len(copy_layers) != len(layers):
            raise ConfigError(
                f"copy_layers must name {len(layers)} layers, one per layer of the drafter, "
                f"got {list(copy_layers)}"
            )
        for ours, theirs in zip(layers, copy_layers, strict=True):
            prefix = f"model.layers.{theirs}."
            if f"{prefix}input_layernorm.weight" not in weights:
                raise ConfigError(f"copy_layers names layer {theirs}, which the target lacks")
            _copy_layer(ours, {n.removeprefix(prefix): w for n, w in weights.items()})
        first = weights[f"model.layers.{copy_layers[0]}.input_layernorm.weight"]
        if hasattr(drafter, "hidden_norm"):  # what keys and values of the first layer expect
            drafter.hidden_norm.weight.copy_(first)  # pyright: ignore


def _copy_layer(ours: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """Parameters of one of the target's layers, by their names inside it."""
    for name, parameter in ours.named_parameters():
        matrix = given.get(name)
        if matrix is None:
            continue
        # A second input in front: the target's matrix reads the features, the embedding
        # starts with no say.
        if matrix.dim() == 2 and parameter.shape[1] == 2 * matrix.shape[1]:
            parameter[:, matrix.shape[1] :] = matrix
        else:
            parameter.copy_(matrix)
    norm = given["input_layernorm.weight"].float()
    if hasattr(ours, "hidden_norm"):
        ours.hidden_norm.weight.copy_(norm)  # pyright: ignore
    for kind in "qk":  # norms that the target lacks: queries and keys keep their usual length
        name = f"self_attn.{kind}_norm"
        if f"{name}.weight" not in given and hasattr(ours.get_submodule(name), "weight"):
            spread = (given[f"self_attn.{kind}_proj.weight"].float() * norm).square().sum(1)
            ours.get_submodule(name).weight.fill_(float(spread.mean().sqrt()))  # pyright: ignore
