"""Confidences that mean what they say: a temperature and a shift per depth, from left to right.

Sequential temperature scaling (DSpark, arXiv 2607.05147): the chance that a draft survives to a
depth is the product of the confidences down to it, and the temperature of that depth is the one
with which this product is best calibrated, those of the depths before it being fixed. A shift of
the logit comes with it here (Platt): a drafter that knows its training texts too well is too sure
of all others, and no temperature moves a chance of a half.

Shape legend: A drafts, K depths.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints import LoadedDrafter, save_drafter
from outrider.checkpoints import check_target as check_drafter
from outrider.drafters import Drafter
from outrider.errors import DataError
from outrider.target.load import LoadedModel
from outrider.training.batches import Place, places_of, split
from outrider.training.build import attach_target
from outrider.training.dataset import TARGET_ID, Data, check_made_for, check_target, unlike
from outrider.training.evaluate import Judged, judge
from outrider.training.features import feature_source
from outrider.training.losses import LossWeights
from outrider.training.recipe import Optimisation, recipe_of

OCTAVES, SHIFTS = torch.linspace(-2, 2, 17), torch.linspace(-1, 1, 17)  # temperatures: 1/4 to 4
FINER = torch.linspace(-1, 1, 9)  # of a step of either, around the best
BINS = 20
ANCHORS_PER_TEXT = 128  # errors of a few percent are seen in thousands of drafts only


@dataclass(slots=True)
class Calibration:
    """What calibrates each depth, and the calibration error of survival before and after there."""

    temperatures: list[float]
    shifts: list[float]
    ece_before: list[float]
    ece_after: list[float]

    @property
    def mean_errors(self) -> tuple[float, float]:
        """Of all depths, before and after."""
        before, after = (sum(each) / len(each) for each in (self.ece_before, self.ece_after))
        return before, after

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def fit(judged: Judged) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperature and shift of each depth, float32 [K]: sigmoid(logit / temperature + shift)."""
    truth = judged.hits.cumprod(dim=1)  # [A, K]
    survival = torch.ones(len(truth))
    temperatures, shifts = [], []
    for depth in range(truth.shape[1]):
        temperature, shift = _fit_depth(judged.confidence[:, depth], survival, truth[:, depth])
        temperatures.append(temperature)
        shifts.append(shift)
        survival = survival * _chance(judged.confidence[:, depth], temperature, shift)
    return torch.stack(temperatures), torch.stack(shifts)


def _fit_depth(
    logits: torch.Tensor, survival: torch.Tensor, truth: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperature and shift with which survival [A] to the depth before and logits [A] say best
    what survives to this one."""

    def error(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
        octave, shift = pair
        return expected_error(survival * _chance(logits, 2**octave, shift), truth)

    octave, shift = min(itertools.product(OCTAVES, SHIFTS), key=error)
    steps = OCTAVES[1] - OCTAVES[0], SHIFTS[1] - SHIFTS[0]
    around = itertools.product(octave + steps[0] * FINER, shift + steps[1] * FINER)
    octave, shift = min(around, key=error)
    return 2**octave, shift


def _chance(logits: torch.Tensor, temperatures: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(logits / temperatures + shifts)


def calibrate(drafter: Drafter, judged: Judged, num_texts: int) -> Calibration | None:
    """Fit on every other text, tell the error on the rest, and calibrate the drafter.

    None, and nothing is set, where one of the halves has no text that is long enough.
    """
    numbers = range(num_texts)
    fitted, checked = judged.of(numbers[::2]), judged.of(numbers[1::2])
    if not len(fitted.places) or not len(checked.places):
        return None
    found = fit_and_check(fitted, checked)
    with torch.no_grad():
        drafter.temperatures.copy_(torch.tensor(found.temperatures))
        drafter.shifts.copy_(torch.tensor(found.shifts))
    return found


def recalibrate(
    loaded: LoadedDrafter, directory: Path, data: Data, model: LoadedModel, features: Path | None
) -> Calibration:
    """Calibrate a drafter on disk anew, and write it there again.

    Of the data it was trained on, the texts that its run held out are taken; of other data all.

    Raises:
        DataError: data, features or target do not fit it, or not to the texts it was trained on.
    """
    drafter, provenance = loaded.drafter, loaded.config["provenance"]
    check_drafter(drafter.config, model.config_object())
    check_made_for(loaded, directory, model.name, model.tokenizer)
    differs = unlike(loaded.target, {TARGET_ID: model.identity})
    if differs:
        raise DataError(
            f"{directory} was made for other weights of {loaded.target.get('name')} than those of "
            f"{model.name}: {differs}"
        )
    check_target(data, model)
    source, count = feature_source(model, data, drafter.config.target_layer_ids, features)
    held = _held_out(provenance, directory, data, count)
    attach_target(drafter, model.state_dict(), "bfloat16")
    drafter.to(model.device)
    judged = judge(drafter, data, source, held, LossWeights(), anchors_per_text=ANCHORS_PER_TEXT)
    found = None if judged is None else calibrate(drafter, judged, len(held))
    if found is None:
        raise DataError(
            f"too few of the {len(held)} texts of {data.directory} to calibrate {directory} on are "
            "long enough for a whole draft"
        )
    on = {"data": data.header.get("id"), "num_texts": len(held)}
    about = {**provenance, "calibration": {**found.as_json(), **on}}
    save_drafter(drafter, directory, target=loaded.target, provenance=about)
    return found


def _held_out(
    provenance: Mapping[str, Any], directory: Path, data: Data, num_shards: int | None
) -> list[Place]:
    """Texts of the data that the drafter was not trained on."""
    last, given = provenance.get("data"), data.header.get("id")
    if given != last and given in provenance.get("earlier_data", []):
        raise DataError(
            f"{directory} was trained on {data.directory} in an earlier stage: expected the data "
            "of its last one, or data that it has never seen"
        )
    if given != last or "recipe" not in provenance:
        return places_of(data, Optimisation().max_length, num_shards)
    recipe = recipe_of(provenance["recipe"], f"the recipe in {directory}")
    if recipe.held_out < 2:
        raise DataError(
            f"the recipe of {directory} held out {recipe.held_out} texts, expected 2 or more; "
            "give data that it was not trained on"
        )
    places = places_of(data, recipe.training.max_length, num_shards)
    trained, held = split(places, recipe.held_out, recipe.seed)
    if provenance.get("num_texts") not in (None, len(trained)):
        raise DataError(
            f"{directory} was trained on {provenance['num_texts']} texts of this data, now there "
            f"are {len(trained)}, so that others would be held out: give the data and features of "
            "its run"
        )
    return held


def fit_and_check(fitted: Judged, checked: Judged) -> Calibration:
    """Fit on some drafts, and tell the error on others."""
    temperatures, shifts = fit(fitted)
    plain = torch.ones_like(temperatures), torch.zeros_like(shifts)
    return Calibration(
        temperatures.tolist(),
        shifts.tolist(),
        survival_errors(checked, *plain),
        survival_errors(checked, temperatures, shifts),
    )


def survival_errors(
    judged: Judged, temperatures: torch.Tensor, shifts: torch.Tensor
) -> list[float]:
    """Calibration error of survival at each depth with these [K]."""
    said = _chance(judged.confidence, temperatures, shifts).cumprod(dim=1)
    truth = judged.hits.cumprod(dim=1)
    return [expected_error(said[:, k], truth[:, k]) for k in range(truth.shape[1])]


def expected_error(said: torch.Tensor, truth: torch.Tensor) -> float:
    """Expected calibration error of chances [A] against what came [A], in BINS equal bins."""
    place = (said * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, (said - truth).double())
    return float(gaps.abs().sum() / max(1, len(said)))
