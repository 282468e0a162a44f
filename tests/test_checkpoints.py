"""Drafters on disk: what is written is what is read, and what does not fit is named."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.checkpoints import load_drafter, save_drafter
from outrider.checkpoints.find import find_drafters
from outrider.drafters import ALGORITHMS, Drafter, DrafterConfig, make_drafter
from outrider.drafters.base import Texts
from outrider.drafting.build import build_sources
from outrider.errors import ConfigError, DataError

VOCAB, HIDDEN = 50, 32


def make_config(algorithm: str, **changes) -> DrafterConfig:
    values = {
        "algorithm": algorithm,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": 20,
        "num_draft_tokens": 4,
        "target_hidden_size": HIDDEN,
        "target_num_layers": 6,
        "target_layer_ids": {"mtp": (5,), "medusa": (5,), "pard": ()}.get(algorithm, (-1, 2, 4)),
        "mask_token_id": 7,
        "markov_rank": 6 * (algorithm == "dspark"),
        "confidence_head": algorithm == "dspark",
    }
    return DrafterConfig(**{**values, **changes})


def make_random(config: DrafterConfig) -> Drafter:
    """A drafter with random bf16 parameters everywhere, and a random vocabulary."""
    torch.manual_seed(3)
    drafter = make_drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_((0.3 * torch.randn_like(parameter) + 0.1).bfloat16())
    drafter.d2t = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    drafter.temperatures = torch.rand(config.num_draft_tokens) + 0.5
    drafter.shifts = torch.rand(config.num_draft_tokens) - 0.5
    return drafter


def target_matrices() -> tuple[torch.Tensor, torch.Tensor]:
    """An embedding and a head, bf16 [V, H] each."""
    random = torch.Generator().manual_seed(4)
    first, second = torch.randn(2, VOCAB, HIDDEN, generator=random).bfloat16()
    return first, second


def guessed(drafter: Drafter) -> torch.Tensor:
    """Logits on a fixed text with fixed features, float32."""
    config = drafter.config
    random = torch.Generator().manual_seed(5)
    drafter = drafter.float().eval()
    drafter.attach(*(matrix.float() for matrix in target_matrices()))
    features = torch.randn(12, config.feature_size, generator=random)
    texts = Texts(torch.randint(VOCAB, (12,), generator=random), [0, 12], features)
    with torch.no_grad():
        return drafter.guess(texts, torch.tensor([2, 5, 7]), torch.tensor([4, 1, 3])).logits


def save(drafter: Drafter, directory: Path) -> None:
    save_drafter(drafter, directory, target={"name": "toy"}, provenance={"seed": 3})


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_what_is_saved_is_loaded(algorithm, tmp_path):
    drafter = make_random(make_config(algorithm))
    save(drafter, tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter")
    assert loaded.format == "outrider" and loaded.target == {"name": "toy"}
    assert loaded.config["provenance"] == {"seed": 3}
    assert loaded.drafter.config == drafter.config
    assert not loaded.drafter.training and loaded.drafter.head.numel() == 0
    assert loaded.drafter.norm.weight.dtype == torch.bfloat16
    assert loaded.drafter.temperatures.equal(drafter.temperatures)
    assert loaded.drafter.shifts.equal(drafter.shifts)
    assert loaded.drafter.d2t.equal(drafter.d2t) and loaded.drafter.d2t.dtype == torch.int64
    assert guessed(loaded.drafter).equal(guessed(drafter))


def test_the_targets_matrices_are_not_stored(tmp_path):
    drafter = make_random(make_config("eagle3"))
    guessed(drafter)  # attaches
    save(drafter, tmp_path / "drafter")
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    assert not {"embedding", "head", "own_head", "own_embedding"} & stored.keys()
    assert stored["d2t"].dtype == torch.int32
    assert stored["temperatures"].dtype == torch.float32


def test_an_own_head_and_embedding_stay(tmp_path):
    drafter = make_random(make_config("eagle3"))
    plain = guessed(drafter)
    drafter.own_head = torch.randn(20, HIDDEN).bfloat16()
    drafter.own_embedding = torch.randn(VOCAB, HIDDEN).bfloat16()
    changed = guessed(drafter)
    assert not changed.allclose(plain, atol=0.1)
    save(drafter, tmp_path / "drafter")
    assert guessed(load_drafter(tmp_path / "drafter").drafter).equal(changed)


def test_saving_again_replaces_and_loading_leaves_the_random_numbers_alone(tmp_path):
    save(make_random(make_config("dflash")), tmp_path / "drafter")
    save(make_random(make_config("medusa")), tmp_path / "drafter")
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    loaded = load_drafter(tmp_path / "drafter")
    assert torch.rand(3).equal(expected)
    assert loaded.drafter.config.algorithm == "medusa"
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]  # nothing left behind


@pytest.mark.slow
def test_loading_is_quick_for_no_compiler_of_torch_is_imported(tmp_path):
    for algorithm in ALGORITHMS:
        save(make_random(make_config(algorithm)), tmp_path / algorithm)
    code = (
        "import sys\nfrom pathlib import Path\nfrom outrider.checkpoints import load_drafter\n"
        "for path in Path(sys.argv[1]).iterdir(): load_drafter(path)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_directory_with_other_things_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match=r"other files than a drafter's \(thesis.txt\)"):
        save(make_random(make_config("dflash")), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failure_while_saving_keeps_what_was_there(tmp_path, monkeypatch):
    save(make_random(make_config("dflash")), tmp_path / "drafter")

    def full(*_args, **_values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.checkpoints.files.save_file", full)
    with pytest.raises(DataError, match="No space left on device"):
        save(make_random(make_config("medusa")), tmp_path / "drafter")
    assert load_drafter(tmp_path / "drafter").drafter.config.algorithm == "dflash"
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def change_config(directory: Path, change) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def change_tensors(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing: fc.weight"),
        (lambda t: t.update(spare=torch.zeros(2)), "unknown: spare"),
        (
            lambda t: t.update({"fc.weight": torch.zeros(3, 4)}),
            r"fc.weight \[3, 4\] \(expected \[32, 96\]\)",
        ),
        (lambda t: t["d2t"].fill_(VOCAB), "names tokens from 50 to 50, the vocabulary .* has 50"),
        (lambda t: t["d2t"].fill_(3), "names 19 tokens twice"),
        (lambda t: t["norm.weight"].fill_(torch.nan), "norm.weight .* no finite numbers"),
        (lambda t: t.update(d2t=t["d2t"].float()), "expected whole numbers"),
        (lambda t: t["temperatures"].fill_(0), r"temperatures .* \[0.0.*expected above 0"),
        (lambda t: t["temperatures"][1:2].fill_(-1), "temperatures .* -1.0.*expected above 0"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    save(make_random(make_config("eagle3")), tmp_path / "drafter")
    change_tensors(tmp_path / "drafter", change)
    with pytest.raises(DataError, match=message):
        load_drafter(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=9), "version 9 .* expected 1"),
        (lambda c: c.pop("drafter"), "no object named drafter"),
        (lambda c: c["drafter"].update(algorithm="eagle9"), "got 'eagle9'"),
        (lambda c: c["drafter"].update(colour="red"), "colour"),
        (lambda c: c["drafter"].pop("hidden_size"), "hidden_size"),
        (lambda c: c["drafter"].update(target_layer_ids=[6]), r"from -1 to 5, got \[6\]"),
        (lambda c: c.update(format="other"), "no drafter of a known format"),
    ],
)
def test_configurations_that_do_not_fit_are_named(change, message, tmp_path):
    save(make_random(make_config("eagle3")), tmp_path / "drafter")
    change_config(tmp_path / "drafter", change)
    with pytest.raises(DataError, match=message):
        load_drafter(tmp_path / "drafter")


ODD = [None, -1, 0, 10**9, 10**400, 1.5, float("nan"), float("inf"), "x", True, [], [1], {}]


@pytest.mark.parametrize("field", [each.name for each in fields(DrafterConfig)])
def test_odd_values_of_any_field_are_refused_or_harmless(field, tmp_path):
    save(make_random(make_config("dspark")), tmp_path / "drafter")
    config = (tmp_path / "drafter" / "config.json").read_text()
    num_refused = 0
    for value in ODD:
        (tmp_path / "drafter" / "config.json").write_text(config)
        change_config(tmp_path / "drafter", lambda c, v=value: c["drafter"].update({field: v}))
        try:
            load_drafter(tmp_path / "drafter")
        except DataError:
            num_refused += 1
    assert num_refused >= 7


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_a_config_that_is_no_object(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match=r"config\.json"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("value", [None, [], [1], "x", 5, {}])
@pytest.mark.parametrize("name", ["target", "drafter"])
def test_drafters_in_the_cache_that_are_damaged_are_passed_over(name, value, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    good, bad = (tmp_path / "drafters" / kind for kind in ("b", "a"))  # the bad one comes first
    target = {"fingerprint": "f"}
    for path in (good, bad):
        save_drafter(make_random(make_config("pard")), path, target=target, provenance={})
    assert find_drafters("f", {})["pard"] == bad
    change_config(bad, lambda c: c.update({name: value}))
    assert find_drafters("f", {})["pard"] == good


def test_auto_takes_the_best_drafter_of_the_tokenizer_that_is_whole(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def names(fingerprint):
        tokenizer = SimpleNamespace(fingerprint=fingerprint)
        return [source.name for source in build_sources("auto", tokenizer=tokenizer)]

    assert names("f") == ["lookup", "predicted", "forced"]
    for kind in ("mtp", "eagle3", "dspark"):
        path = tmp_path / "drafters" / kind
        drafter = make_random(make_config(kind))
        save_drafter(drafter, path, target={"fingerprint": "f"}, provenance={})
        assert names("f")[3:] == [kind]
    assert names("another") == ["lookup", "predicted", "forced"]
    (tmp_path / "drafters" / "dspark" / "model.safetensors").write_bytes(b"half of it")
    assert names("f")[3:] == ["eagle3"]
    assert "dspark" in caplog.text


def test_auto_leaves_a_drafter_alone_that_is_for_another_target_of_the_same_tokenizer(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    tokenizer = SimpleNamespace(fingerprint="f")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 4}
    for name, num_layers in (("first", 9), ("second", 4)):
        target = {"fingerprint": "f", **sizes, "num_layers": num_layers}
        drafter = make_random(make_config("dspark"))
        save_drafter(drafter, tmp_path / "drafters" / name, target=target, provenance={})
    assert find_drafters("f", sizes)["dspark"] == tmp_path / "drafters" / "second"
    for name, value in {"vocab_size": 65, "hidden_size": 33, "num_layers": 5}.items():
        other: Any = SimpleNamespace(**{**sizes, name: value})
        sources = build_sources("auto", tokenizer=tokenizer, target=other)
        assert [source.name for source in sources] == ["lookup", "predicted", "forced"]
        with pytest.raises(ConfigError, match=f"no dspark drafter ships.*{name}={value}"):
            build_sources({"method": "dspark"}, tokenizer=tokenizer, target=other)


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(DataError, match=r"expected a directory with config\.json"):
        load_drafter(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"it has no config\.json"):
        load_drafter(tmp_path)
    save(make_random(make_config("medusa")), tmp_path / "drafter")
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(DataError, match="cannot be read"):
        load_drafter(tmp_path / "drafter")
    (tmp_path / "drafter" / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"has no model\.safetensors"):
        load_drafter(tmp_path / "drafter")


def test_weights_in_several_files(tmp_path):
    drafter = make_random(make_config("eagle3"))
    save(drafter, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    places = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "model.safetensors").unlink()
    assert guessed(load_drafter(tmp_path).drafter).equal(guessed(drafter))
