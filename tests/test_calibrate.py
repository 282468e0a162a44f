"""What confidences are worth: errors of calibration, and temperatures and shifts that undo them."""

import pytest
import torch

from outrider.drafters.base import Guesses
from outrider.training.calibrate import expected_error, fit, fit_and_check, survival_errors
from outrider.training.evaluate import Judged, confidence_logits


def test_confidence_without_a_head_is_the_logit_of_the_chosen_token() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = confidence_logits(Guesses(torch.zeros(2), torch.zeros(2), [(logits, torch.eye(3))]))
    assert torch.allclose(torch.sigmoid(found), logits.softmax(-1).max(-1).values, atol=1e-6)


def test_calibration_error_of_known_cases() -> None:
    said = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.1, 0.1])
    truth = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    assert expected_error(said, truth) == pytest.approx((4 * 0.15 + 2 * 0.1) / 6, abs=1e-6)


@pytest.mark.slow
def test_temperatures_and_shifts_undo_confidence_that_is_too_sure() -> None:
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(80_000, 3, generator=random)
    hits = torch.bernoulli(torch.sigmoid(logits), generator=random)
    factors = torch.tensor([2.0, 1.0, 0.5])
    shifts = torch.tensor([-0.5, 0.0, 0.4])
    judged = Judged(torch.arange(80_000), hits, (logits - shifts) * factors, 0.0)
    temperatures, found = fit(judged)
    assert torch.allclose(temperatures, factors, rtol=0.15)
    assert torch.allclose(found, shifts, atol=0.11)
    numbers = range(80_000)
    done = fit_and_check(judged.of(numbers[::2]), judged.of(numbers[1::2]))
    assert max(done.ece_after) < 0.02 < max(done.ece_before)
    assert done.ece_before == survival_errors(
        judged.of(numbers[1::2]), torch.ones(3), torch.zeros(3)
    )
