"""What the tests of training share: a toy target on disk, texts of it, and small recipes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_models import VOCAB, toy_model, toy_tokenizer

from outrider.target.load import load_model
from outrider.training import run
from outrider.training.dataset import Data, Sample, write_header, write_shard
from outrider.training.features import feature_reader, open_features, write_features

TEMPLATE = (
    "{% for m in messages %}{{ '(user)' if m.role == 'user' else '(other)' }}{{ m.content }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}(bot){% endif %}"
)
MASK = "<pad>"
MASKED = {"mask_token": MASK, "target_layer_ids": [0, 1]}
SHAPES: dict[str, dict[str, Any]] = {  # of the smallest drafters of every algorithm
    "dspark": {**MASKED, "markov_rank": 8, "confidence_head": True},
    "dflash": MASKED,
    "eagle3": {"target_layer_ids": [0, 1]},
    "peagle": MASKED,
    "mtp": {"target_layer_ids": [2]},
    "medusa": {"target_layer_ids": [2]},
    "pard": {"mask_token": MASK, "copy_layers": [0]},
}


def toy_recipe(algorithm: str = "dspark", **training: Any) -> dict[str, Any]:
    """A recipe as plain objects, for the toy target."""
    shape = {"algorithm": algorithm, "draft_vocab_size": 64, "num_draft_tokens": 3}
    return {
        "drafter": {**shape, **SHAPES[algorithm]},
        "training": {
            "steps": 6,
            "tokens_per_pack": 128,
            "packs_per_step": 2,
            "anchors_per_pack": 32,
            "precision": "float32",
            **training,
        },
        "held_out": 4,
    }


def write_target(directory: Path, template: str | None = TEMPLATE) -> Path:
    """A random Llama with its tokenizer as a Hugging Face directory."""
    toy_model("llama", tie_word_embeddings=True).save_pretrained(directory)
    toy_tokenizer(template).save_pretrained(directory)
    return directory


def write_data(directory: Path, num_shards: int = 2, texts: int = 10) -> Path:
    """Random texts of two categories, greedy and sampled."""
    random = np.random.default_rng(0)
    names = ["chat", "code"]
    directory.mkdir(parents=True, exist_ok=True)
    for index in range(num_shards):
        samples = [
            Sample(
                names[number % 2],
                float(number % 3 == 0),
                random.integers(3, VOCAB, 5).tolist(),
                random.integers(3, VOCAB, int(random.integers(12, 40))).tolist(),
            )
            for number in range(texts)
        ]
        write_shard(directory, index, samples, names)
    write_header(
        directory / "data.json", "outrider training data", {"id": "t", "categories": names}
    )
    return directory


def write_all_features(directory: Path, model: Path, data: Data) -> Path:
    """Of all layers of the toy target."""
    about = {"layer_ids": [0, 1, 2], "hidden_size": 32, "target": "model"}
    open_features(directory, data, about)
    reader = feature_reader(load_model(str(model)), (0, 1, 2))
    assert sum(write_features(reader, data, directory)) == data.num_tokens
    open_features(directory, data, about)  # goes on where it ended
    return directory


@pytest.fixture(autouse=True)
def quiet_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hub; one thread, for two wait longer for each other than toys take; and no pictures."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(run, "draw_curve", lambda directory: directory / "curve.png")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
