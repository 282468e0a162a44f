"""Training that starts from a drafter on disk.

Shape legend: U tokens that a drafter can name.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from outrider.checkpoints import OURS, load_drafter
from outrider.drafters import Drafter
from outrider.errors import DataError
from outrider.training.build import attach_target
from outrider.training.dataset import difference

NAMED = "draft_vocab_size"


class Start:
    """A drafter to start from: one of the same shape, or one that can name fewer tokens.

    Raises:
        DataError, ModelError: there is none at the path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded = load_drafter(path)

    @property
    def token_ids(self) -> torch.Tensor:
        """Tokens that it can name, int64 [U], ascending."""
        return self._loaded.drafter.d2t

    @property
    def seen(self) -> list[str]:
        """Ids of the data that it was trained on."""
        about = self._loaded.config["provenance"] if self._loaded.format == OURS else {}
        seen = [*about.get("earlier_data", []), about.get("data")]
        return [each for each in dict.fromkeys(seen) if each is not None]

    def give(self, drafter: Drafter, weights: Mapping[str, torch.Tensor]) -> None:
        """Give its parameters to a drafter, which keeps its own for the tokens this one lacks.

        Args:
            weights: the target's; an embedding or head of the start that is the target's goes.

        Raises:
            DataError: they do not fit; the message names what differs.
        """
        differs = self._difference(drafter)
        if not differs:
            attach_target(self._loaded.drafter, weights)
        theirs, ours = self._loaded.drafter.state_dict(), drafter.state_dict()
        more = sorted(theirs.keys() - ours.keys())
        if more and not differs:
            differs = f"it has {', '.join(more)}, expected the target's"
        if differs:
            raise DataError(f"{self._path} is no start for this recipe: {differs}")
        places = torch.searchsorted(drafter.d2t, self.token_ids)  # [U]
        del theirs["d2t"]
        for name, value in theirs.items():
            if value.shape == ours[name].shape:
                ours[name].copy_(value)
            else:  # a row for each token
                ours[name][places] = value.to(ours[name])

    def _difference(self, drafter: Drafter) -> str:
        theirs, ours = self._loaded.drafter.config.as_json(), drafter.config.as_json()
        if not theirs["target_num_layers"]:  # not told
            theirs["target_num_layers"] = ours["target_num_layers"]
        if not theirs["markov_rank"]:  # then it reads no token, whatever is told
            theirs["confidence_sees_token"] = ours["confidence_sees_token"]
        if theirs[NAMED] < ours[NAMED]:
            theirs[NAMED] = ours[NAMED]
        elif theirs == ours and not torch.equal(self.token_ids, drafter.d2t):
            return "its tokens are not in ascending order"
        return difference(theirs, ours)
