"""What holds for all tests."""

import pytest
import torch

from outrider.engine.engine import Engine
from outrider.native import library
from outrider.policy.cost import CostModel


@pytest.fixture(autouse=True, scope="session")
def one_thread_of_torch() -> None:
    """Two would wait longer for each other than toys take; kernels keep threads of their own."""
    library()  # has as many as torch has now
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def steady_costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans follow the prior cost of a row: what a busy machine measures must not fail a test."""
    if "measured_costs" not in request.keywords:
        monkeypatch.setattr(CostModel, "observe", lambda *_: None)
        monkeypatch.setattr(Engine, "measure_costs", lambda _: None)
