"""Drafters of speculators draft the same here, and ours there: the same logits in float32."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from exchange_peers import SPECULATORS, peer_python
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.checkpoints import export_drafter, load_drafter
from outrider.drafters import Drafter, DrafterConfig, make_drafter
from outrider.drafters.base import Texts

pytestmark = [
    pytest.mark.exchange,
    pytest.mark.timeout(1200),
    pytest.mark.slow,
    pytest.mark.skipif(
        peer_python(SPECULATORS) is None,
        reason="speculators is not installed: `make test-exchange` installs it",
    ),
]

VOCAB, HIDDEN, LAYERS, DEPTHS = 60, 32, 6, 4
STARTS = [0, 9, 21]  # of two texts
ANCHORS = torch.tensor([2, 4, 10, 14])
IDS = [0, 2, 5]  # as outputs of layers; the embedding is among them in another case
TIGHT = {"atol": 1e-4, "rtol": 0.0}

SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
EAGLE = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "draft_vocab_size": 20}
BLOCK = {"aux_hidden_state_layer_ids": [0, 3, 5], "mask_token_id": 7}
NORMS = {"norm_before_residual": True, "norm_before_fc": True}
MARKOV = {"block_size": DEPTHS, "markov_rank": 6, "draft_vocab_size": 20}
# name: (algorithm, values of the speculator, kind of layers, their number, an own head?)
THEIRS = {
    "eagle3": ("eagle3", EAGLE, "llama", 1, False),
    "eagle3 of Qwen3, normed, own head": ("eagle3", EAGLE | NORMS, "qwen3", 2, True),
    "eagle3, all tokens": ("eagle3", EAGLE | {"draft_vocab_size": VOCAB}, "llama", 1, False),
    "peagle": ("peagle", EAGLE | {"mask_token_id": 7}, "llama", 2, False),
    "peagle of Qwen3": ("peagle", EAGLE | NORMS | {"mask_token_id": 7}, "qwen3", 2, True),
    "dflash": ("dflash", BLOCK | {"block_size": 5, "draft_vocab_size": 20}, "qwen3", 2, False),
    "dflash, all tokens": (
        "dflash",
        BLOCK | {"block_size": 5, "draft_vocab_size": VOCAB},
        "qwen3",
        2,
        False,
    ),
    "dspark": ("dspark", BLOCK | MARKOV, "qwen3", 2, False),
    "dspark, gated": ("dspark", BLOCK | MARKOV | {"markov_head_type": "gated"}, "qwen3", 1, False),
    "dspark, rnn": (
        "dspark",
        BLOCK | MARKOV | {"markov_head_type": "rnn", "confidence_head_with_markov": False},
        "qwen3",
        1,
        False,
    ),
    "dspark without heads": (
        "dspark",
        BLOCK
        | {"block_size": DEPTHS, "markov_rank": 0, "draft_vocab_size": VOCAB}
        | {"enable_confidence_head": False, "confidence_head_with_markov": False},
        "qwen3",
        1,
        False,
    ),
}
OURS = {
    "eagle3": {"algorithm": "eagle3"},
    "eagle3, normed": {
        "algorithm": "eagle3",
        "num_layers": 2,
        "qk_norm": True,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "target_layer_ids": (-1, 1, 2, 5),
    },
    "peagle": {"algorithm": "peagle", "num_layers": 2, "mask_token_id": 7},
    "dflash": {"algorithm": "dflash", "num_layers": 2, "qk_norm": True, "mask_token_id": 7},
    "dflash, all tokens": {
        "algorithm": "dflash",
        "qk_norm": True,
        "mask_token_id": 7,
        "draft_vocab_size": VOCAB,
    },
    **{
        f"dspark, {kind}": {
            "algorithm": "dspark",
            "qk_norm": True,
            "mask_token_id": 7,
            "markov_rank": 6,
            "markov_head": kind,
            "confidence_head": True,
        }
        for kind in ("vanilla", "gated", "rnn")
    },
}


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A directory with a target and inputs."""
    directory = tmp_path_factory.mktemp("exchange")
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=LAYERS, initializer_range=0.5)
    target = LlamaForCausalLM(config)
    for parameter in target.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as the targets of this world are
    target.save_pretrained(directory / "target")
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor(STARTS).diff())
    inputs = {
        "token_ids": torch.randint(VOCAB, (STARTS[-1],)),
        "documents": documents,
        "positions": torch.arange(STARTS[-1]) - torch.tensor(STARTS)[documents],
        "anchors": ANCHORS,
        "depths": torch.tensor(DEPTHS),
    }
    inputs |= {f"features {n}": torch.randn(STARTS[-1], n * HIDDEN) for n in (3, 4)}
    save_file(inputs, directory / "inputs")
    return directory


def run_peer(work: Path, number_of_layers: int, **job) -> None:
    """Run the peer on the inputs with so many layers of features."""
    values = {
        "target": str(work / "target"),
        "inputs": str(work / "inputs"),
        "features": f"features {number_of_layers}",
    }
    path = work / "job.json"
    path.write_text(json.dumps({"make": [], "read": []} | values | job))
    script = Path(__file__).with_name("run_speculators.py")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [str(peer_python(SPECULATORS)), str(script), str(path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def made_by_peer(work) -> Path:
    entries = [
        {
            "directory": str(work / name),
            "algorithm": algorithm,
            "values": values,
            "layers": SIZES | {"model_type": kind, "num_hidden_layers": count},
            "own": own,
        }
        for name, (algorithm, values, kind, count, own) in THEIRS.items()
    ]
    run_peer(work, 3, make=entries)
    return work


@pytest.fixture(scope="module")
def read_by_peer(work) -> Path:
    target = load_file(work / "target" / "model.safetensors")
    config = LlamaConfig.from_pretrained(work / "target")
    by_layers: dict[int, list[str]] = {}
    for name, values in OURS.items():
        directory = work / f"ours {name}"
        drafter = random_drafter(values)
        export_drafter(
            drafter,
            directory,
            "speculators",
            target_config=config,
            target_weights=target,
            target_name=str(work / "target"),
        )
        count = len(drafter.config.target_layer_ids)
        by_layers.setdefault(count, []).append(str(directory))
    for count, directories in by_layers.items():
        run_peer(work, count, read=directories)
    return work


def random_drafter(values: dict) -> Drafter:
    """Random bf16 parameters and vocabulary, as stored values round-trip."""
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": 20,
        "num_draft_tokens": DEPTHS,
        "target_hidden_size": HIDDEN,
        "target_num_layers": LAYERS,
        "target_layer_ids": (0, 2, 5),
        "rope_theta": 5000.0,
        "max_position": 128,
    }
    torch.manual_seed(2)
    drafter = make_drafter(DrafterConfig(**sizes | values))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_((0.3 * torch.randn_like(parameter) + 0.1).bfloat16())
    size = drafter.config.draft_vocab_size
    drafter.d2t = torch.randperm(VOCAB)[:size].sort().values
    return drafter


def guessed(drafter: Drafter, work: Path) -> dict[str, torch.Tensor]:
    """Our logits [A, K, U] and confidences [A, K], float32."""
    inputs = load_file(work / "inputs")
    target = load_file(work / "target" / "model.safetensors")
    drafter = drafter.float()
    drafter.attach(target["model.embed_tokens.weight"], target["lm_head.weight"])
    features = inputs[f"features {len(drafter.config.target_layer_ids)}"]
    texts = Texts(inputs["token_ids"], STARTS, features)
    with torch.no_grad():
        found = drafter.guess(texts, ANCHORS, torch.full_like(ANCHORS, DEPTHS))
    order = (found.anchors * DEPTHS + found.depths).argsort()
    tensors = {"logits": found.logits[order].unflatten(0, (len(ANCHORS), DEPTHS))}
    if found.confidence is not None:
        tensors["confidence"] = found.confidence[order].view(len(ANCHORS), DEPTHS)
    return tensors


def check_same(ours: dict[str, torch.Tensor], file: Path) -> None:
    theirs = load_file(file)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert values.isfinite().all() and values.std() > 0.1  # there is something to compare
        torch.testing.assert_close(ours[name], values, **TIGHT)


@pytest.mark.parametrize("name", THEIRS)
def test_their_drafters_draft_the_same_here(name, made_by_peer):
    loaded = load_drafter(made_by_peer / name)
    assert loaded.format == "speculators"
    assert loaded.drafter.config.num_draft_tokens == DEPTHS
    check_same(guessed(loaded.drafter, made_by_peer), made_by_peer / f"{name}.logits")
    own = THEIRS[name][-1]
    assert (loaded.drafter.own_head is not None) == own  # copies of the target's are dropped


@pytest.mark.parametrize("name", OURS)
def test_our_drafters_draft_the_same_there(name, read_by_peer):
    ours = guessed(random_drafter(OURS[name]), read_by_peer)
    check_same(ours, read_by_peer / f"ours {name}.logits")
    again = load_drafter(read_by_peer / f"ours {name}").drafter
    assert again.config == random_drafter(OURS[name]).config
