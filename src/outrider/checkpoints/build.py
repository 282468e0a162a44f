"""From a configuration and tensors by our names to a drafter, and back.

Nothing is filled in or left out in silence: a tensor that is missing, unknown or of another shape
is an error that names it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from outrider.drafters import Drafter, DrafterConfig, check_layers_read, make_drafter
from outrider.errors import ConfigError, DataError

EMBEDDING, HEAD = "own_embedding", "own_head"
CALIBRATED = {"temperatures", "shifts"}  # what calibration sets, in float32
SHOWN = 5  # tensors that a message names


class _Unfilled(TorchFunctionMode):
    """Tensors of the device "meta" that nothing is written to: there is nothing to write, and torch
    would import its compiler to see that, which takes a second and 150 MB."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:
            return torch.empty(len(range(*args)), **kwargs)
        is_filling = getattr(func, "__module__", "") == "torch.nn.init"
        return kwargs["tensor"] if is_filling else func(*args, **kwargs)


def build_from(
    config: DrafterConfig,
    tensors: Mapping[str, torch.Tensor],
    source: object,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Drafter:
    """A drafter with these parameters in the number formats they have, in eval mode, not attached.

    Args:
        tensors: by the names of the module's state; d2t may have any integer type.
        source: where they come from, for messages.
        names: how messages call a tensor, where that is not its name in the state.

    Raises:
        DataError: no such algorithm, or tensors that do not fit the configuration.
    """
    try:
        check_layers_read(config)
        with torch.device("meta"), _Unfilled():  # no memory for values that are replaced
            drafter = make_drafter(config)
    except ConfigError as error:
        raise DataError(f"{source}: {error}") from None
    shapes = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    own = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        HEAD: (config.draft_vocab_size, config.hidden_size),
    }
    shapes |= {name: shape for name, shape in own.items() if name in tensors}
    _check_shapes(shapes, tensors, source, names)
    _check_values(config, tensors, source)
    for name in own.keys() & tensors.keys():
        setattr(drafter, name, tensors[name])
    drafter.load_state_dict({**tensors, "d2t": tensors["d2t"].long()}, assign=True)
    drafter.embedding = drafter.head = torch.empty(0)
    return drafter.eval()


def tensors_of(drafter: Drafter, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The state of a drafter to store: parameters in `dtype`, d2t int32, calibration float32."""
    kept = {"d2t": torch.int32, **dict.fromkeys(CALIBRATED, torch.float32)}
    return {
        name: value.detach().cpu().to(kept.get(name, dtype))
        for name, value in drafter.state_dict().items()
    }


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    source: object,
    names: Mapping[str, str],
) -> None:
    wrong = {
        "missing": sorted(names.get(name, name) for name in shapes.keys() - tensors.keys()),
        "unknown": sorted(names.get(name, name) for name in tensors.keys() - shapes.keys()),
        "of another shape": [
            f"{names.get(name, name)} {list(tensors[name].shape)} (expected {list(shape)})"
            for name, shape in shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ],
    }
    parts = []
    for what, found in wrong.items():
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            parts.append(f"{what}: {', '.join(found[:SHOWN])}{more}")
    if parts:
        raise DataError(f"the tensors of {source} do not fit its configuration; {'; '.join(parts)}")


def _check_values(
    config: DrafterConfig, tensors: Mapping[str, torch.Tensor], source: object
) -> None:
    ids = tensors["d2t"]
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise DataError(f"d2t of {source} is {ids.dtype}, expected whole numbers")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise DataError(
            f"d2t of {source} names tokens from {int(ids.min())} to {int(ids.max())}, the "
            f"vocabulary of its target has {config.vocab_size}"
        )
    if len(ids.unique()) < len(ids):
        raise DataError(f"d2t of {source} names {len(ids) - len(ids.unique())} tokens twice")
    for name, values in tensors.items():
        if name != "d2t" and not values.dtype.is_floating_point:
            raise DataError(f"{name} of {source} is {values.dtype}, expected floating point")
        if name != "d2t" and not bool(values.isfinite().all()):
            raise DataError(f"{name} of {source} holds values that are no finite numbers")
    if bool((tensors["temperatures"] <= 0).any()):
        raise DataError(
            f"temperatures of {source} are {tensors['temperatures'].tolist()}, expected above 0"
        )
