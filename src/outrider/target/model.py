"""Any causal language model of transformers as a target, with our paged KV in its attention."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from outrider.errors import ModelError
from outrider.target.attention import (
    IMPLEMENTATION,
    STEP_KWARG,
    AttentionCall,
    KVLayers,
    PagedKV,
    Step,
    paged_attention,
)
from outrider.target.base import PAGE_SIZE, ForwardBatch, ForwardOutput
from outrider.target.rope import rope_types

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# These look at the largest position of the whole packed batch, so one request would change another.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
PROBE_LENGTHS = (20, 3)  # the first spans two pages that are not neighbours
# Root mean square of the difference over that of the logits. Correct attention differs by rounding
# only (1e-6 in fp32, 1 to 2 % in bf16); a wrong mask or window by 30 % and more on random weights.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_PROBE_TOLERANCE = 0.1

ROWS_DEPEND = "some of its operations sum in an order that depends on the number of rows"


class TransformersTarget:
    """Wraps a loaded model; its attention implementation becomes ours and stays so.

    Args:
        model: a causal language model whose attention goes through transformers' interface.
        max_model_len: longest text in tokens; None takes the model's own limit.
        name: what to call it; None takes the model's own.
        deterministic: run linear layers and attention in the compiled kernels, so that a row's
            logits do not depend on what shares its forward; None: where that can be had.

    Raises:
        ModelError: the model cannot be run exactly, or not deterministically as was asked for;
            the message holds the reason.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        max_model_len: int | None = None,
        name: str | None = None,
        deterministic: bool | None = None,
    ):
        config = text_config(model.config)
        self.name = name or model.name_or_path or type(model).__name__
        reason = why_not(model)
        if reason is not None:
            raise ModelError(f"{self.name} cannot be run exactly: {reason}")
        self.model = model.eval()
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.max_model_len = check_model_len(max_model_len, config)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.embedding, self.head = _tables(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._wanted: tuple[int, ...] = ()
        self._taps: dict[int, torch.Tensor] = {}
        self._install_taps()
        self._num_slots = 4 * PAGE_SIZE
        self._kv: KVLayers = PagedKV(self._num_slots)
        self.deterministic = False
        self.vocab_size = self._probe(deterministic)
        self.kv_bytes_per_token = self._kv.bytes_per_token

    def allocate_kv(self, num_pages: int) -> None:
        """Make room for ``num_pages`` pages, dropping what was there."""
        self._num_slots = num_pages * PAGE_SIZE
        self._kv = self._kv.resized(self._num_slots)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the new rows, write their KV, return logits of ``batch.logits_rows``."""
        for layer in batch.layer_ids:
            assert -1 <= layer < self.num_layers, (layer, self.num_layers)
        logits, _ = self._run(batch)
        features = None
        if batch.layer_ids:
            features = torch.cat([self._taps[i] for i in batch.layer_ids], dim=-1)
            self._taps.clear()
        return ForwardOutput(logits, features)

    def move_kv(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Copy KV between physical slots, as if all were read before any write."""
        with torch.inference_mode():
            self._kv.move(sources, destinations)

    @torch.inference_mode()
    def _run(self, batch: ForwardBatch) -> tuple[torch.Tensor, Step]:
        """Logits [R, V] and the step, which has recorded the attention calls."""
        step = Step(batch, self._kv, self._num_slots, self.device)
        rows = _long(batch.logits_rows, self.device)
        kwargs: dict[str, Any] = {STEP_KWARG: step}
        if self._keeps_logits:
            kwargs["logits_to_keep"] = rows
        self._wanted = batch.layer_ids
        output = self.model(
            input_ids=_long(batch.token_ids, self.device)[None],
            position_ids=_long(batch.positions, self.device)[None],
            use_cache=False,
            **kwargs,
        )
        self._wanted = ()
        logits = output.logits[0]
        return (logits if self._keeps_logits else logits[rows]).float(), step

    def _install_taps(self) -> None:
        """Hooks that keep the output of the layers a forward wants (-1: input of the first)."""
        layers = getattr(self.model.get_decoder(), "layers", None)
        if layers is None:
            layers = getattr(self.model.get_decoder(), "h", None)  # GPT-2's name for it
        if layers is None or len(layers) != self.num_layers:
            raise ModelError(
                f"{self.name} cannot be run: its decoder has no list of {self.num_layers} layers, "
                "so layer outputs cannot be read"
            )

        def keep_embedding(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            if -1 in self._wanted:
                self._taps[-1] = (args[0] if args else kwargs["hidden_states"])[0]

        def keeper(layer_id: int) -> Any:
            def keep(_: torch.nn.Module, args: tuple, output: Any) -> None:
                if layer_id in self._wanted:
                    self._taps[layer_id] = (output if torch.is_tensor(output) else output[0])[0]

            return keep

        layers[0].register_forward_pre_hook(keep_embedding, with_kwargs=True)
        for i, layer in enumerate(layers):
            layer.register_forward_hook(keeper(i))

    def _probe(self, deterministic: bool | None) -> int:
        """Compare a small packed forward with the model's own; gives the width of the logits.

        This catches what no configuration tells: attention that bypasses the interface, biases
        we do not know, positions that look at the whole packed batch.
        """
        vocab = text_config(self.model.config).vocab_size
        # Ids from all over the vocabulary: a text of a few repeated special tokens is so badly
        # conditioned that a real model in bf16 differs from itself by 40 % (eager against SDPA).
        texts = [(np.arange(n, dtype=np.int32) * 7919 + 131) % vocab for n in PROBE_LENGTHS]
        if self.model.config._attn_implementation == IMPLEMENTATION:  # another target has it too
            self.model.set_attn_implementation("eager")
        with self._failing_as("a probe of its own forward"), torch.inference_mode():
            own = [
                self.model(input_ids=_long(text, self.device)[None], use_cache=False).logits[0]
                for text in texts
            ]
        expected = torch.cat(own).float()
        _use_our_attention(self.model, self.name)
        with self._failing_as("a probe with our attention"):
            ours, step = self._run(_probe_batch(texts))
        self._check_calls(step)
        self._check_logits(ours, expected)
        if deterministic is not False:
            reason = self._make_deterministic(texts, expected, step.calls)
            if reason is not None and deterministic:
                raise ModelError(f"{self.name} cannot run deterministically: {reason}")
        return ours.shape[-1]

    @contextmanager
    def _failing_as(self, what: str) -> Iterator[None]:
        try:
            yield
        except (TypeError, KeyError, ValueError, RuntimeError, AssertionError) as error:
            raise ModelError(f"{self.name} cannot be run: {what} failed: {error}") from error

    def _make_deterministic(
        self, texts: list[np.ndarray], expected: torch.Tensor, calls: list[AttentionCall]
    ) -> str | None:
        """Let the kernels take over, and prove that rows are then independent; or say why not."""
        from outrider.target.row_exact import (
            RowExactLinear,
            RowExactModules,
            TiledKV,
            why_not_row_exact,
        )

        reason = why_not_row_exact(self.model, calls)
        if reason is not None:
            return reason
        ((kv_heads, head_dim),) = calls[0].kv_shapes
        torch_kv, modules = self._kv, RowExactModules(self.model)
        head = self.model.get_output_embeddings()
        if isinstance(head, RowExactLinear):
            head.weight = self.head
        self._kv = TiledKV(
            num_layers=self.num_layers,
            heads=calls[0].num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self.dtype,
            num_slots=self._num_slots,
        )
        together, _ = self._run(_probe_batch(texts))
        in_parts = [
            self._run(_probe_batch([texts[0][:end]], first_row=start))[0]
            for start, end in pairwise((0, 1, 3, PROBE_LENGTHS[0]))
        ]
        if torch.equal(torch.cat(in_parts), together[: PROBE_LENGTHS[0]]):
            self._check_logits(together, expected)
            self.deterministic = True
            return None
        modules.undo()
        self._kv = torch_kv
        return ROWS_DEPEND

    def _check_logits(self, ours: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((ours - expected).norm() / expected.norm())
        tolerance = PROBE_TOLERANCE.get(self.dtype, HALF_PROBE_TOLERANCE)
        if not error <= tolerance:
            raise ModelError(
                f"{self.name} cannot be run exactly: with our attention its logits differ from its "
                f"own by {error:.1%} (at most {tolerance:.1%} is rounding)"
            )

    def _check_calls(self, step: Step) -> None:
        called = sorted(call.layer for call in step.calls)
        if called != list(range(self.num_layers)):
            raise ModelError(
                f"{self.name} cannot be run exactly: our attention must be called once in each of "
                f"{self.num_layers} layers, it was called {len(called)} times "
                f"in {len(set(called))} layers"
            )
        kinds = getattr(text_config(self.model.config), "layer_types", None) or []
        for call in step.calls:
            sliding = bool(kinds) and kinds[call.layer] == "sliding_attention"
            if sliding and call.scoring.window is None:
                raise ModelError(
                    f"{self.name} cannot be run exactly: layer {call.layer} slides, "
                    "but the model does not tell its window to the attention function"
                )


def why_not(model: "PreTrainedModel") -> str | None:
    """Why this model cannot be run exactly, as far as its configuration tells."""
    config = text_config(model.config)
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, expected a decoder-only causal language model"
    if getattr(model, "_is_stateful", False):
        return "it keeps recurrent state, which cannot be rolled back when a draft is rejected"
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS)
    if unknown:
        return f"layers of type {', '.join(unknown)}; known are {', '.join(sorted(KNOWN_LAYERS))}"
    if getattr(config, "num_kv_shared_layers", 0):
        return f"its last {config.num_kv_shared_layers} layers share the keys of earlier ones"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention looks ahead (use_bidirectional_attention)"
    for rope in rope_types(config):
        if rope in BATCH_DEPENDENT_ROPE:
            return (
                f"its position scaling is {rope!r}, which follows the longest text of a batch, "
                "so one request would change another"
            )
    return None


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the language model."""
    return config.get_text_config(decoder=True)


def check_model_len(max_model_len: int | None, config: Any) -> int:
    """The longest text: what was asked for, at most what the model was made for."""
    limit = getattr(config, "max_position_embeddings", None) or 2048
    if max_model_len is None:
        return int(limit)
    if not 0 < max_model_len <= limit:
        raise ModelError(
            f"max_model_len must be in [1, {limit}] for this model, got {max_model_len}"
        )
    return max_model_len


def _use_our_attention(model: "PreTrainedModel", name: str) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, cast(Any, paged_attention))
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    except ValueError as error:
        raise ModelError(f"{name} does not take a registered attention: {error}") from error
    if text_config(model.config)._attn_implementation != IMPLEMENTATION:
        raise ModelError(
            f"{name} does not take a registered attention: {type(model).__name__} does not go "
            "through transformers' attention interface"
        )


def _probe_batch(texts: Sequence[np.ndarray], first_row: int = 0) -> ForwardBatch:
    """The texts from `first_row` on; what comes before has been run."""
    lengths = [len(text) - first_row for text in texts]
    arange = [np.arange(n, dtype=np.int32) for n in lengths]
    return ForwardBatch(
        token_ids=np.concatenate([text[first_row:] for text in texts]),
        positions=np.concatenate(arange) + first_row,
        row_starts=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.full(len(texts), first_row, dtype=np.int32),
        page_tables=[np.array(table, dtype=np.int32) for table in ([3, 1], [0])][: len(texts)],
        parents=np.concatenate(arange) - 1,
        logits_rows=np.arange(sum(lengths), dtype=np.int32),
        is_tree=np.zeros(len(texts), dtype=bool),
    )


def _long(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)


def _tables(model: "PreTrainedModel") -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head of a model, [V, hidden] each."""
    embedding = cast(torch.Tensor, model.get_input_embeddings().weight).detach()
    output = model.get_output_embeddings()
    head = embedding if output is None else cast(torch.Tensor, output.weight).detach()
    return embedding, head
