"""What the tests of loading share: an empty cache, and no kernels."""

import numpy as np
import pytest
from toy_models import VOCAB, toy_model

from outrider.errors import ModelError
from outrider.target.load import load_target

TOKENS = np.random.default_rng(0).integers(3, VOCAB, 30).tolist()
CLOSE = {"rtol": 1e-5, "atol": 5e-5}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, request):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("outrider.target.native.library", lambda: None)  # nothing is compiled here
    if "model" not in request.keywords:  # real weights are converted once, in the user's cache
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def gemma_like() -> dict:
    """Six layers, so that llama.cpp's pattern of one full layer in six shows."""
    return {"num_hidden_layers": 6, "layer_types": None, "sliding_window": 8}


def toy(family: str, **overrides):
    return toy_model(family, **((gemma_like() if family == "gemma3" else {}) | overrides))


def error_of(*args, **kwargs) -> str:
    with pytest.raises(ModelError) as caught:
        load_target(*args, **kwargs)
    return str(caught.value)
