"""native/sample.cpp in plain torch: for CUDA, and where no compiler is found.

The same rules. Weights are double here and sums run over sorted logits, so the two may disagree
about a token whose place at a top_p border is a matter of rounding.

Shape legend: R rows, C columns of the logits.
"""

import numpy as np
import torch

from outrider.target.noise import gumbel_rows, mix


def sample(
    logits: torch.Tensor, rows: np.ndarray, id_map: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [R] and probabilities float32 [R] of float32 logits [R, C]; rows is ROW [R]."""
    kept, weights = _warp(logits, rows)
    columns = np.arange(logits.shape[1]) if id_map is None else id_map
    scores = logits.double()
    drawn = np.flatnonzero(rows["temperature"] > 0).tolist()
    if drawn:
        ids = torch.from_numpy(columns.astype(np.int64)).to(logits.device)
        places = zip(
            rows["noise_key"][drawn].tolist(), rows["position"][drawn].tolist(), strict=True
        )
        noise = gumbel_rows([mix(key, position) for key, position in places], ids)
        noisy = scores[drawn] / _column(rows[drawn], "temperature", logits) + noise
        scores[drawn] = torch.where(kept[drawn], noisy, -torch.inf)
    choices = _first_largest(scores)
    chosen_weights = weights.gather(1, choices[:, None])[:, 0]
    probs = chosen_weights / torch.where(kept, weights, 0.0).sum(1)
    return columns[choices.cpu().numpy()].astype(np.int32), probs.float().cpu().numpy()


def probs(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Probabilities float32 [R, C] of float32 logits [R, C]; rows is ROW [R]."""
    kept, weights = _warp(logits, rows)
    weights = torch.where(kept, weights, 0.0)
    warped = weights / weights.sum(1, keepdim=True)
    greedy = torch.from_numpy(rows["temperature"] == 0).to(logits.device)[:, None]  # [R, 1]
    certain = torch.zeros_like(warped).scatter_(1, _first_largest(logits)[:, None], 1.0)
    return torch.where(greedy, certain, warped).float()


def logprobs(
    logits: torch.Tensor, chosen: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and log probabilities [R, 1 + count], chosen first, and the chosen ones' ranks [R]."""
    ids = np.full((len(chosen), 1 + count), -1, np.int32)
    values = np.zeros((len(chosen), 1 + count), np.float32)
    ranks = np.empty(len(chosen), np.int32)
    for r, token_id in enumerate(chosen.tolist()):  # by row: sums must not depend on their number
        row = logits[r]
        logged = row.double() - row.double().logsumexp(0)
        best = torch.sort(row, descending=True, stable=True).indices[:count]
        best = best[row[best] > -torch.inf]
        ids[r, 0], values[r, 0] = token_id, float(logged[token_id])
        ids[r, 1 : 1 + len(best)] = best.cpu().numpy()
        values[r, 1 : 1 + len(best)] = logged[best].cpu().numpy()
        equal_before = (row[:token_id] == row[token_id]).sum()
        ranks[r] = 1 + int((row > row[token_id]).sum() + equal_before)
    return ids, values, ranks


def _warp(logits: torch.Tensor, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Which columns are kept, bool [R, C], and unnormalised weights, double [R, C].

    Greedy rows keep everything and have their weights at temperature 1.
    """
    x = logits.double()
    top = x.amax(1, keepdim=True)  # [R, 1]
    temperature = _column(rows, "temperature", logits)
    temperature = torch.where(temperature == 0, 1.0, temperature)
    weights = torch.exp((x - top) / temperature)
    border = top + temperature * torch.log(_column(rows, "min_p", logits))
    is_greedy = rows["temperature"] == 0
    limited = (rows["top_p"] < 1.0) | ((rows["top_k"] > 0) & (rows["top_k"] < x.shape[1]))
    for r in np.flatnonzero(limited & ~is_greedy).tolist():
        border[r] = _border(x[r], weights[r], border[r], rows[r])
    greedy = torch.from_numpy(is_greedy).to(logits.device)[:, None]
    return greedy | (x >= border), weights


def _border(
    x: torch.Tensor, weights: torch.Tensor, floor: torch.Tensor, row: np.void
) -> torch.Tensor:
    """The lowest logit that top_k and top_p keep, of those at or above the floor."""
    ordered, order = torch.sort(x[x >= floor], descending=True)
    weights = weights[x >= floor][order]
    if 0 < row["top_k"] < len(ordered):
        kept = ordered >= ordered[int(row["top_k"]) - 1]
        ordered, weights = ordered[kept], weights[kept]
    if row["top_p"] < 1.0:
        above = weights.cumsum(0) - weights
        kept = above < row["top_p"] * weights.sum()
        ordered = ordered[: int(kept.sum())]
    return ordered[-1]


def _first_largest(values: torch.Tensor) -> torch.Tensor:
    """The lowest index of each row's maximum, int64 [R]."""
    largest = values == values.amax(1, keepdim=True)
    indices = torch.arange(values.shape[1], device=values.device)
    return torch.where(largest, indices, values.shape[1] - 1).amin(1)


def _column(rows: np.ndarray, name: str, logits: torch.Tensor) -> torch.Tensor:
    """A setting as double [R, 1] on the logits' device."""
    return torch.from_numpy(np.ascontiguousarray(rows[name])).to(logits.device)[:, None]
