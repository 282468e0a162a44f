"""A ForwardBatch in the layout of the compiled kernels."""

import ctypes

import numpy as np
import torch

from outrider.target.base import PAGE_SIZE, ForwardBatch


class NativeBatch(ctypes.Structure):
    """`Batch` of native/kv.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in ("rows", "requests", "logits_count", "tap_count", "two_way")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("tokens", "positions", "row_starts", "context_lens", "page_offsets", "pages"),
                *("parents", "is_tree", "logits_rows", "tap_layers", "logits", "taps"),
                *("x", "side", "states"),
            )
        ),
    )


def native_batch(
    batch: ForwardBatch, **tensors: torch.Tensor | None
) -> tuple[NativeBatch, dict[str, np.ndarray]]:
    """The batch for one call, and the arrays it points into: keep them until the call is over.

    Args:
        tensors: contiguous float32 tensors that are read or written: logits, taps, x, side,
            states.
    """
    used = -(-(batch.context_lens + np.diff(batch.row_starts)) // PAGE_SIZE)
    tables = [table[:n] for table, n in zip(batch.page_tables, used, strict=True)]
    arrays = {
        "tokens": batch.token_ids,
        "positions": batch.positions,
        "row_starts": batch.row_starts,
        "context_lens": batch.context_lens,
        "page_offsets": np.cumsum(used, dtype=np.int32) - used.astype(np.int32),
        "pages": np.concatenate(tables),
        "parents": batch.parents,
        "is_tree": batch.is_tree,
        "logits_rows": batch.logits_rows,
        "tap_layers": np.asarray(batch.layer_ids, dtype=np.int32),
    }
    packed = NativeBatch(
        rows=batch.num_rows,
        requests=batch.num_requests,
        logits_count=len(batch.logits_rows),
        tap_count=len(batch.layer_ids),
        two_way=batch.two_way,
        **{name: t.data_ptr() for name, t in tensors.items() if t is not None},
        **{name: array.__array_interface__["data"][0] for name, array in arrays.items()},
    )
    return packed, arrays
