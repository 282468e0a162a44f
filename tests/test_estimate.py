"""What drafts are worth before anything is decoded."""

import json

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.policy.expected import expected, tokens_per_step


def test_the_yield_is_the_series_of_survivals() -> None:
    alpha, count = 0.6, 5
    closed = (1 - alpha ** (count + 1)) / (1 - alpha)
    assert tokens_per_step([alpha], count) == pytest.approx(closed)
    assert tokens_per_step([1.0], 3) == 4
    assert tokens_per_step([0.5, 0.8], 3) == pytest.approx(1 + 0.5 + 0.4 + 0.32)


def test_a_serial_drafter_pays_for_every_token_and_a_parallel_one_once() -> None:
    costs = [1.1, 1.2, 1.3]
    serial = expected([0.7], 0.2, costs, is_serial=True)
    parallel = expected([0.7], 0.2, costs)
    assert [row.step_cost for row in serial] == pytest.approx([1.3, 1.6, 1.9])
    assert [row.step_cost for row in parallel] == pytest.approx([1.3, 1.4, 1.5])
    assert serial[0].speedup == pytest.approx(1.7 / 1.3)
    assert parallel[2].speedup == pytest.approx((1 + 0.7 + 0.49 + 0.343) / 1.5)


def test_at_its_break_even_a_length_is_as_fast_as_plain_decoding() -> None:
    for row in expected([0.5], 0.3, [1.05, 1.2, 1.4], is_serial=True):
        assert row.break_even is not None
        at_it = expected([row.break_even], 0.3, [1.05, 1.2, 1.4], is_serial=True)
        assert at_it[row.num_draft_tokens - 1].speedup == pytest.approx(1.0)
    [free] = expected([0.0], 0.0, [1.2])  # free drafts lose too, where rows have a price
    assert free.speedup == pytest.approx(1 / 1.2) and free.break_even == pytest.approx(0.2)
    [dear] = expected([1.0], 1.5, [1.2])
    assert dear.break_even is None and dear.speedup < 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--acceptance", "1.2"], "a chance in [0, 1], or one per depth"),
        (["--acceptance", "0.5,x"], "got '0.5,x'"),
        (["--acceptance", "nan"], "a chance in [0, 1]"),
        (["--acceptance", "0.5", "--draft-cost", "-1"], "--draft-cost must be in [0.0, 1000.0]"),
    ],
)
def test_what_is_no_chance_or_cost_is_refused(options: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["estimate", *options])
    assert result.exit_code != 0 and told in str(result.exception)


@pytest.mark.model
def test_the_default_model_is_measured_and_too_long_drafts_are_told() -> None:
    serial = ["--serial", "--draft-cost", "0.3", "--draft-tokens", "8"]
    result = CliRunner().invoke(app, ["estimate", "--acceptance", "0.45", *serial])
    assert result.exit_code == 0
    assert "8 draft tokens are too many" in result.stdout or "plain decoding" in result.stdout
    result = CliRunner().invoke(
        app,
        ["estimate", "--acceptance", "0.8,0.7", "--batch", "4", "--draft-tokens", "3", "--json"],
    )
    found = json.loads(result.stdout)
    assert [row["num_draft_tokens"] for row in found["lengths"]] == [1, 2, 3]
    costs = [row["step_cost"] for row in found["lengths"]]
    assert 1 <= costs[0] <= costs[1] <= costs[2]
    assert found["lengths"][1]["tokens_per_step"] == pytest.approx(1 + 0.8 + 0.56)
