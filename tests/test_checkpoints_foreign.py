"""Formats of others: what is written is read as the same drafter, what cannot be run is named.

That the packages themselves agree is tested in tests/exchange.
"""

import functools
import json
import operator

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoints import (
    HIDDEN,
    VOCAB,
    change_config,
    change_tensors,
    guessed,
    make_config,
    make_random,
    target_matrices,
)
from transformers import LlamaConfig

from outrider.checkpoints import FORMATS, export_drafter, load_drafter, save_drafter
from outrider.checkpoints.find import algorithm_at
from outrider.errors import DataError

TARGET = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_hidden_layers=6,
    num_attention_heads=4,
    architectures=["LlamaForCausalLM"],
)
ALL = {"draft_vocab_size": VOCAB, "qk_norm": True, "target_layer_ids": (0, 2, 4)}
NO_HEADS = {"markov_rank": 0, "confidence_head": False, "confidence_sees_token": False}
# (format, algorithm, changes): what each format can hold
HELD = {
    "speculators, eagle3": ("speculators", "eagle3", {"norm_before_fc": True}),
    "speculators, peagle": ("speculators", "peagle", {"norm_before_residual": True}),
    "speculators, dflash": ("speculators", "dflash", {"qk_norm": True}),
    "speculators, dspark": ("speculators", "dspark", {"qk_norm": True, "markov_head": "rnn"}),
    "z-lab, dflash": ("z-lab", "dflash", ALL),
    "deepspec, dspark": ("deepspec", "dspark", ALL | {"markov_head": "gated"}),
    "deepspec, dflash": ("deepspec", "dspark", ALL | NO_HEADS),
    "deepspec, eagle3": ("deepspec", "eagle3", ALL | {"num_layers": 1}),
}


def target_weights() -> dict[str, torch.Tensor]:
    embedding, head = target_matrices()
    return {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


def make(name: str, **more):
    """A drafter that its format can hold; a mask only where one is used."""
    _, algorithm, changes = HELD[name]
    masks = {} if algorithm != "eagle3" else {"mask_token_id": None}
    return make_random(make_config(algorithm, **masks | changes | more))


def export(drafter, directory, format: str, config=TARGET) -> None:
    export_drafter(
        drafter,
        directory,
        format,
        target_config=config,
        target_weights=target_weights(),
        target_name="some/target",
    )


@pytest.mark.parametrize("name", HELD)
def test_what_is_exported_is_loaded(name, tmp_path):
    drafter = make(name)
    export(drafter, tmp_path / "theirs", HELD[name][0])
    loaded = load_drafter(tmp_path / "theirs")
    assert loaded.format == HELD[name][0] and loaded.target == {}
    assert algorithm_at(tmp_path / "theirs") == HELD[name][1]  # a config may name it alone
    assert loaded.drafter.config == drafter.config
    assert loaded.drafter.d2t.equal(drafter.d2t)
    assert loaded.drafter.temperatures.equal(torch.ones(4))
    assert guessed(loaded.drafter).equal(guessed(drafter))
    assert loaded.drafter.own_head is None  # the copies of the target's went when it was attached


@pytest.mark.parametrize("name", HELD)
def test_from_their_format_to_ours(name, tmp_path):
    drafter = make(name)
    own = None if name == "z-lab, dflash" else torch.randn(len(drafter.d2t), HIDDEN).bfloat16()
    drafter.own_head = own
    export(drafter, tmp_path / "theirs", HELD[name][0])
    read = load_drafter(tmp_path / "theirs").drafter
    expected = guessed(drafter)
    assert guessed(read).equal(expected)
    save_drafter(read, tmp_path / "ours", target={}, provenance={})
    again = load_drafter(tmp_path / "ours").drafter
    assert (again.own_head is None) == (own is None)
    assert guessed(again).equal(expected)


def test_layers_and_tokens_are_counted_as_speculators_does(tmp_path):
    drafter = make("speculators, eagle3")
    export(drafter, tmp_path, "speculators")
    values = json.loads((tmp_path / "config.json").read_text())
    assert drafter.config.target_layer_ids == (-1, 2, 4)
    assert values["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5]
    assert values["transformer_layer_config"]["num_aux_hidden_states"] == 3
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["LlamaForCausalLM"],
    }
    tensors = load_file(tmp_path / "model.safetensors")
    assert (torch.arange(20) + tensors["d2t"]).equal(drafter.d2t)
    assert tensors["t2d"].nonzero().squeeze(1).equal(drafter.d2t)
    assert tensors["lm_head.weight"].equal(target_weights()["lm_head.weight"][drafter.d2t])
    assert tensors["embed_tokens.weight"].equal(target_weights()["model.embed_tokens.weight"])


def test_how_deep_the_target_is_may_be_untold(tmp_path):
    export(make("speculators, eagle3"), tmp_path / "theirs", "speculators")
    change_config(tmp_path / "theirs", lambda config: config.pop("num_target_layers"))
    assert load_drafter(tmp_path / "theirs").drafter.config.target_num_layers == 0


def test_vllm_is_told_that_blocks_see_both_ways(tmp_path):
    export(make("speculators, dflash"), tmp_path, "speculators")
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window_non_causal"] is True
    assert "embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")


def test_zlab_files_hold_nothing_of_the_target(tmp_path):
    export(make("z-lab, dflash"), tmp_path, "z-lab")
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight"} == {
        n for n in names if "lay" not in n
    }
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [0, 2, 4]}
    assert values["block_size"] == 5


def layers(values: dict) -> dict:
    return values["transformer_layer_config"]


REFUSED = [
    ("speculators, eagle3", lambda c: c.update(speculators_model_type="mtp"), "'mtp'"),
    ("speculators, eagle3", lambda c: c.update(fc_norm=True), "fc_norm True"),
    ("speculators, eagle3", lambda c: c.update(norm_output=True), "norm_output True"),
    ("speculators, eagle3", lambda c: c.pop("draft_vocab_size"), "no draft_vocab_size"),
    ("speculators, eagle3", lambda c: c.pop("speculators_config"), "no proposal_methods"),
    ("speculators, eagle3", lambda c: c.pop("transformer_layer_config"), "no object transf"),
    (
        "speculators, eagle3",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=None),
        "eagle_aux_hidden_state_layer_ids .* must be a list of layers, got None",
    ),
    (
        "speculators, eagle3",
        lambda c: layers(c).update(hidden_size=64),
        r"fc.weight \[32, 96\] \(expected \[64, 192\]\)",
    ),
    ("speculators, eagle3", lambda c: layers(c).update(model_type="gpt2"), "type 'gpt2'"),
    ("speculators, eagle3", lambda c: layers(c).update(attention_bias=True), "attention_bias True"),
    ("speculators, eagle3", lambda c: layers(c).update(mlp_bias=True), "mlp_bias True"),
    ("speculators, eagle3", lambda c: layers(c).update(hidden_act="gelu"), "hidden_act 'gelu'"),
    (
        "speculators, eagle3",
        lambda c: layers(c).update(vocab_size=49),
        r"embed_tokens.weight \[50, 32\]",
    ),
    (
        "speculators, eagle3",
        lambda c: layers(c).update(
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        ),
        "rope_type 'linear'",
    ),
    ("speculators, eagle3", lambda c: layers(c).update(hidden_size="wide"), "cannot be used"),
    ("speculators, peagle", lambda c: c.pop("mask_token_id"), "no mask_token_id"),
    (
        "speculators, dflash",
        lambda c: layers(c).update(layer_types=["sliding_attention", "full_attention"]),
        "layer_types .*sliding_attention",
    ),
    ("speculators, dflash", lambda c: c.update(sample_from_anchor=True), "sample_from_anchor True"),
    ("speculators, dspark", lambda c: c.update(sample_from_anchor=False), "sample_from_anchor F"),
    ("speculators, dspark", lambda c: c.update(markov_head_type="deep"), "got 'deep'"),
    ("z-lab, dflash", lambda c: c["dflash_config"].update(use_swa=True), "use_swa True"),
    ("z-lab, dflash", lambda c: c["dflash_config"].update(conv_kernel_size=2), "conv_kernel_size"),
    ("z-lab, dflash", lambda c: c["dflash_config"].pop("mask_token_id"), "no mask_token_id"),
    ("z-lab, dflash", lambda c: c["dflash_config"].update(target_layer_ids=[9]), "got .9."),
    ("z-lab, dflash", lambda c: c.update(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
    ("z-lab, dflash", lambda c: c.pop("block_size"), "no block_size"),
    ("deepspec, dspark", lambda c: c.update(architectures=["Gemma4DSparkModel"]), "Gemma4DSpark"),
    ("deepspec, eagle3", lambda c: c.update(fc_norm=True), "fc_norm True"),
    ("deepspec, eagle3", lambda c: c.pop("ttt_length"), "no ttt_length"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_cannot_be_run_is_named(name, change, message, tmp_path):
    export(make(name), tmp_path / "theirs", HELD[name][0])
    change_config(tmp_path / "theirs", change)
    with pytest.raises(DataError, match=message):
        load_drafter(tmp_path / "theirs")


ODD = [None, -1, "x", True, [1], ["x"], {"a": []}]


def odd_places(values: dict, path: tuple = ()) -> list[tuple]:
    """Every key of a config.json, and of the objects and lists in it."""
    found = []
    for key, value in values.items():
        found.append((*path, key))
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        found += odd_places(inner, (*path, key)) if isinstance(inner, dict) else []
    return found


@pytest.mark.parametrize(
    "name", ["speculators, eagle3", "speculators, dspark", "z-lab, dflash", "deepspec, dspark"]
)
def test_odd_values_of_any_key_are_refused_or_harmless(name, tmp_path, monkeypatch):
    directory = tmp_path / "theirs"
    export(make(name), directory, HELD[name][0])
    for module in FORMATS.values():  # values, no tensors
        monkeypatch.setattr(module, "read_drafter", lambda _, config: config)
    whole = json.loads((directory / "config.json").read_text())
    num_refused = 0
    for path in odd_places(whole):
        for value in ODD:
            values = json.loads(json.dumps(whole))
            inside = functools.reduce(operator.getitem, path[:-1], values)
            inside[path[-1]] = value
            (directory / "config.json").write_text(json.dumps(values))
            try:
                load_drafter(directory)
            except DataError:
                num_refused += 1
    assert num_refused > 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("d2t"), "has no d2t, which tells the 20 tokens .* target's 50"),
        (lambda t: t.update(d2t=t["d2t"][:5].clone()), r"d2t .* is \[5\], expected \[20\]"),
        (lambda t: t["t2d"].fill_(True), "t2d and d2t .* name different tokens"),
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "missing: layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"layers.0.extra": torch.zeros(1)}), "unknown: layers.0.extra"),
    ],
)
def test_their_tensors_that_do_not_fit(change, message, tmp_path):
    export(make("speculators, peagle"), tmp_path / "theirs", "speculators")
    change_tensors(tmp_path / "theirs", change)
    with pytest.raises(DataError, match=message):
        load_drafter(tmp_path / "theirs")


def test_a_vocabulary_may_do_without_maps_where_it_is_whole(tmp_path):
    drafter = make("speculators, eagle3", draft_vocab_size=VOCAB)
    export(drafter, tmp_path / "theirs", "speculators")
    assert "d2t" not in load_file(tmp_path / "theirs" / "model.safetensors")
    assert guessed(load_drafter(tmp_path / "theirs").drafter).equal(guessed(drafter))


def test_matrices_of_the_target_in_the_files_are_passed_over(tmp_path):
    export(make("speculators, eagle3"), tmp_path / "theirs", "speculators")
    extra = {"verifier_norm.weight": torch.ones(3), "verifier_lm_head.weight": torch.ones(4)}
    change_tensors(tmp_path / "theirs", lambda tensors: tensors.update(extra))
    assert load_drafter(tmp_path / "theirs").drafter.config.algorithm == "eagle3"


@pytest.mark.parametrize(
    ("format", "algorithm", "changes", "message"),
    [
        ("speculators", "medusa", {}, "medusa has no place .* of speculators"),
        ("speculators", "dflash", {}, "norm on every head .* expected one .* with qk_norm"),
        ("speculators", "eagle3", {"target_layer_ids": (4, 2)}, r"must ascend .* \[4, 2\]"),
        ("z-lab", "dspark", ALL, "is for dflash, got a drafter of dspark"),
        ("z-lab", "dflash", ALL | {"draft_vocab_size": 20}, "all 50 tokens .* this drafter 20"),
        ("deepspec", "dflash", ALL, "is for dspark and eagle3, got a drafter of dflash"),
        ("deepspec", "eagle3", ALL, "with one layer"),
        ("deepspec", "dspark", {"qk_norm": True}, "all 50 tokens"),
        ("gguf", "eagle3", {}, "must be one of .* got 'gguf'"),
    ],
)
def test_what_a_format_cannot_hold(format, algorithm, changes, message, tmp_path):
    with pytest.raises(DataError, match=message):
        export(make_random(make_config(algorithm, **changes)), tmp_path / "theirs", format)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 51}, "vocab_size 50, this one has 51"),
        ({"hidden_size": 64}, "hidden_size 32, this one has 64"),
        ({"num_hidden_layers": 4}, "reads layer 4 of its target, this one has 4 layers"),
    ],
)
def test_another_target_is_refused(changes, message, tmp_path):
    other = LlamaConfig(**{**TARGET.to_dict(), **changes})
    with pytest.raises(DataError, match=message):
        export(make("speculators, eagle3"), tmp_path / "theirs", "speculators", other)


def test_a_vocabulary_in_disorder_is_not_exported(tmp_path):
    drafter = make("speculators, eagle3")
    drafter.d2t = drafter.d2t.flip(0)
    with pytest.raises(DataError, match="must ascend"):
        export(drafter, tmp_path / "theirs", "speculators")


def test_own_matrices_that_a_format_would_lose(tmp_path):
    drafter = make("speculators, dflash")
    drafter.own_embedding = torch.randn(VOCAB, HIDDEN)
    with pytest.raises(DataError, match="always reads the target's embedding"):
        export(drafter, tmp_path / "theirs", "speculators")
    drafter = make("z-lab, dflash")
    drafter.own_head = torch.randn(VOCAB, HIDDEN)
    with pytest.raises(DataError, match="this drafter its own"):
        export(drafter, tmp_path / "theirs", "z-lab")
