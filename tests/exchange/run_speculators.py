"""Runs in the environment of speculators: makes random drafters, and logits of drafters.

One argument, a JSON file: {"target": directory, "inputs": safetensors file, "features":
name of a tensor in it, "make": [...],
"read": [...]}. Each entry of "make" is {"directory", "algorithm", "values", "layers", "own"} and
is built and saved there; each of "read" is a directory. Logits [A, K, U] of either go to
<directory>.logits, confidences [A, K] of DSpark beside them.

Logits are those that training sees. Where the package draws anchors at random, ours are put in;
where it goes on to a loss, what would go in is taken instead.
"""

# pyright: reportMissingImports=false
import json
import sys

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.model import SpeculatorModel
from speculators.models import (
    DFlashDraftModel,
    DFlashSpeculatorConfig,
    DSparkDraftModel,
    DSparkSpeculatorConfig,
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
    PEagleDraftModel,
    PEagleSpeculatorConfig,
)
from speculators.models.dflash import core as dflash_core
from speculators.models.dspark import core as dspark_core
from speculators.models.peagle import core as peagle_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

KINDS = {
    "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig),
    "peagle": (PEagleDraftModel, PEagleSpeculatorConfig),
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
}


def make(entry, target, inputs):
    """A drafter with random parameters, for the target."""
    torch.manual_seed(1)
    model_class, config_class = KINDS[entry["algorithm"]]
    depths = int(inputs["depths"])
    config = config_class(
        transformer_layer_config=AutoConfig.for_model(**entry["layers"]),
        speculators_config=SpeculatorsConfig(
            algorithm=entry["algorithm"],
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=depths)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(target),
        ),
        **entry["values"],
    )
    config.transformer_layer_config._attn_implementation = "eager"
    model = model_class(config=config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix_of_target = name.split(".")[0] in ("embed_tokens", "lm_head", "verifier_lm_head")
            if entry["own"] or not matrix_of_target:
                parameter.copy_(0.3 * torch.randn_like(parameter) + 0.1)
    if model.use_draft_vocab:
        ids = torch.randperm(model.verifier_vocab_size)[: model.draft_vocab_size].sort().values
        named = torch.zeros(model.verifier_vocab_size, dtype=torch.bool)
        named[ids] = True
        model.load_vocab_mappings(named, ids - torch.arange(len(ids)))
    model.load_verifier_weights()
    model.save_pretrained(entry["directory"])
    return model


def read(directory):
    config = SpeculatorModel.config_class.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(directory, config=config, dtype=torch.float32)


@torch.no_grad()
def logits(model, inputs):
    """Tensors to save."""
    model = model.float().eval()
    algorithm = model.config.speculators_model_type
    return (of_eagle3 if algorithm == "eagle3" else of_blocks)(model, inputs)


def of_eagle3(model, inputs):
    found = []
    model.lm_head.register_forward_hook(lambda _module, _given, out: found.append(out[0]))
    model(
        hidden_states=inputs["features"][None],
        input_ids=inputs["token_ids"].roll(-1)[None],  # beside a token's features, the next token
        document_ids=inputs["documents"][None],
        position_ids=inputs["positions"][None],
        ttt_steps=int(inputs["depths"]),
    )
    return {"logits": torch.stack([step[inputs["anchors"] - 1] for step in found], dim=1)}


def of_blocks(model, inputs):
    algorithm, depths = model.config.speculators_model_type, int(inputs["depths"])
    core = {"peagle": peagle_core, "dflash": dflash_core, "dspark": dspark_core}[algorithm]
    anchors, total = inputs["anchors"], len(inputs["token_ids"])
    taken = {}

    def take(logits, targets, confidence=None, *_args, **values):
        taken.update(logits=values.get("logits", logits), confidence=confidence)
        return torch.zeros(()), {}

    core.compute_metrics = lambda logits=None, targets=None, *a, **v: take(logits, targets, *a, **v)
    # Rows of P-EAGLE are named by the token whose features they have, blocks by the last token.
    dflash_core.select_anchors = lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    rows = anchors - 1
    peagle_core.generate_cod_sample_indices = lambda **_: (
        torch.cat([torch.arange(total), rows.repeat(depths - 1)]),
        torch.cat(
            [
                torch.zeros(total, dtype=torch.long),
                torch.arange(1, depths).repeat_interleave(len(rows)),
            ]
        ),
    )
    shift = algorithm == "peagle"
    model(
        hidden_states=inputs["features"][None],
        input_ids=inputs["token_ids"].roll(-1 * shift)[None],
        loss_mask=torch.ones(1, total),
        verifier_last_hidden_states=torch.zeros(1, total, model.hidden_size),
        document_ids=inputs["documents"][None],
        position_ids=inputs["positions"][None],
        max_anchors=len(anchors),
    )
    found = taken["logits"][0]
    if algorithm == "peagle":
        masks = found[total:].unflatten(0, (depths - 1, len(rows)))
        return {"logits": torch.cat([found[rows][None], masks]).transpose(0, 1)}
    found = found.unflatten(0, (len(anchors), model.block_size))
    if algorithm == "dflash":
        return {"logits": found[:, 1:]}
    confidence = taken["confidence"]
    return {"logits": found} | (
        {} if confidence is None else {"confidence": confidence.view(found.shape[:2])}
    )


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    inputs = load_file(job["inputs"])
    inputs["features"] = inputs[job["features"]]
    made = [(entry["directory"], make(entry, job["target"], inputs)) for entry in job["make"]]
    loaded = [(directory, read(directory)) for directory in job["read"]]
    for directory, model in [*made, *loaded]:
        found = {name: value.contiguous() for name, value in logits(model, inputs).items()}
        save_file(found, f"{directory}.logits")


if __name__ == "__main__":
    main()
