"""A target that finds every KV mistake, a tokenizer of bytes, and sources that replay a text."""

import codecs
from collections.abc import Callable, Sequence

import numpy as np
import torch

from outrider.drafting.source import Draft, DraftContext, DraftSource, Outcome
from outrider.engine.engine import Engine
from outrider.policy.fixed import FixedLength
from outrider.policy.view import StepView, cap
from outrider.results import RequestOutput
from outrider.sampling_params import SamplingParams
from outrider.target.base import PAGE_SIZE, ForwardBatch, ForwardOutput

MASK = 2**64 - 1
ROOT = 0x243F6A8885A308D3  # hash of the empty path


def path_hash(parent: int, token: int) -> int:
    z = (parent * 0x9E3779B97F4A7C15 + token + 1) & MASK
    z = ((z ^ (z >> 31)) * 0xBF58476D1CE4E5B9) & MASK
    return z ^ (z >> 29)


def path_hashes(parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """`path_hash` of many, uint64 [n]."""
    z = parents * np.uint64(0x9E3779B97F4A7C15) + tokens.astype(np.uint64) + np.uint64(1)
    z = (z ^ (z >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return z ^ (z >> np.uint64(29))


class FakeTarget:
    """Logits are a hash of the token path; every KV slot remembers whose it is.

    A slot stores token, position and the hash of the path it was written for. A forward walks
    the slots of each context and asserts that they form one unbroken path, so that a wrong page,
    a lost move or a stale slot is found where it happens.
    """

    def __init__(
        self, vocab_size: int = 40, max_model_len: int = 256, sharpness: float = 3.0
    ) -> None:
        self.name = "fake"
        self.vocab_size = vocab_size
        self.hidden_size = 4
        self.num_layers = 2
        self.max_model_len = max_model_len
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.deterministic = True
        self.kv_bytes_per_token = 8
        random = np.random.default_rng(5)
        self.embedding, self.head = (
            torch.from_numpy(random.normal(size=(vocab_size, 4)).astype(np.float32))
            for _ in range(2)
        )
        self.sharpness = sharpness
        self.num_forwards = 0
        self.num_rows: list[int] = []
        self._ids = np.arange(vocab_size, dtype=np.uint64) * np.uint64(0x94D049BB133111EB)

    def allocate_kv(self, num_pages: int) -> None:
        slots = num_pages * PAGE_SIZE
        self.slot_token = np.full(slots, -1, np.int64)
        self.slot_position = np.full(slots, -1, np.int64)
        self.slot_hash = np.zeros(slots, np.uint64)

    def logits_of(self, path: int) -> np.ndarray:
        """float32 [V] after the path with this hash."""
        z = self._ids ^ np.uint64(path)
        z = (z ^ (z >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        z = (z ^ (z >> np.uint64(29))) * np.uint64(0xC4CEB9FE1A85EC53)
        uniform = ((z ^ (z >> np.uint64(32))) >> np.uint64(40)).astype(np.float32) / 2**24
        return self.sharpness * uniform / (1.02 - uniform) ** 0.3

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.num_forwards += 1
        self.num_rows.append(batch.num_rows)
        assert len(batch.token_ids) == len(batch.positions) == len(batch.parents)
        assert batch.token_ids.dtype == batch.positions.dtype == batch.parents.dtype == np.int32
        assert ((batch.token_ids >= 0) & (batch.token_ids < self.vocab_size)).all()
        hashes: list[int] = []
        for index in range(batch.num_requests):
            hashes += self._forward_one(batch, index)
        rows = [self.logits_of(hashes[row]) for row in batch.logits_rows.tolist()]
        logits = torch.from_numpy(np.array(rows, np.float32).reshape(-1, self.vocab_size))
        features = None
        if batch.layer_ids:
            features = torch.tensor([self.feature(h, batch.layer_ids) for h in hashes])
        return ForwardOutput(logits, features)

    def feature(self, path: int, layer_ids: Sequence[int]) -> list[float]:
        return [float((path >> 8 * i) % 251 + layer) for layer in layer_ids for i in range(4)]

    def move_kv(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        assert len(set(destinations.tolist())) == len(destinations)
        for slots in (self.slot_token, self.slot_position, self.slot_hash):
            slots[destinations] = slots[sources]

    def _forward_one(self, batch: ForwardBatch, index: int) -> list[int]:
        start, end = batch.row_starts[index : index + 2].tolist()
        context = int(batch.context_lens[index])
        logical = np.arange(context + end - start)
        slots = batch.page_tables[index][logical // PAGE_SIZE] * PAGE_SIZE + logical % PAGE_SIZE
        old = slots[:context]
        assert (self.slot_position[old] == logical[:context]).all(), (
            index,
            self.slot_position[old],
        )
        hashes = np.concatenate([[np.uint64(ROOT)], self.slot_hash[old]])
        breaks = np.flatnonzero(path_hashes(hashes[:-1], self.slot_token[old]) != hashes[1:])
        assert not len(breaks), f"slot of position {breaks[0]}: another path"
        path = int(hashes[-1])
        found: list[int] = []
        for row in range(start, end):
            parent = int(batch.parents[row])
            assert -1 <= parent < row - start
            assert batch.is_tree[index] or parent == row - start - 1
            above = found[parent] if parent >= 0 else path
            depth = int(batch.positions[start + parent]) if parent >= 0 else context - 1
            assert batch.positions[row] == depth + 1, (row, batch.positions[row], depth)
            found.append(path_hash(above, int(batch.token_ids[row])))
        new = slots[context:]
        self.slot_token[new] = batch.token_ids[start:end]
        self.slot_position[new] = batch.positions[start:end]
        self.slot_hash[new] = np.array(found, np.uint64)
        return found


class FakeTokenizer:
    """Token ids are indices of byte strings; characters may span tokens."""

    def __init__(self, pieces: Sequence[bytes], special: Sequence[int] = ()) -> None:
        self.pieces = list(pieces)
        self.special = set(special)
        self.eos_token_id = 0
        self.chat_template = "<role>: <content>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        left, ids = text.encode(), []
        while left:
            best = max(
                (i for i, piece in enumerate(self.pieces) if piece and left.startswith(piece)),
                key=lambda i: len(self.pieces[i]),
            )
            ids.append(best)
            left = left[len(self.pieces[best]) :]
        return ids

    def chat(self, messages: Sequence[dict], **variables) -> str:
        return "\n".join(f"{m['role']}, {m['content']}" for m in messages) + "\n"

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i in self.special)]
        return b"".join(self.pieces[i] for i in kept).decode("utf-8", "replace")

    def text_of(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def stream(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> "FakeStream":
        return FakeStream(self, skip_special_tokens)


class FakeStream:
    def __init__(self, tokenizer: FakeTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        skipped = self._tokenizer.special if self._skip else ()
        pieces = [self._tokenizer.pieces[i] for i in token_ids if i not in skipped]
        return self._decoder.decode(b"".join(pieces))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


LETTERS = [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz .,\n"]
HALVES = ["€".encode()[:2], "€".encode()[2:], "🙂".encode()[:1], "🙂".encode()[1:]]
ALPHABET = FakeTokenizer(
    [b"<eos>", *LETTERS, b"END", b"ND", b"the ", "é".encode(), *HALVES], special=[0]
)  # 39 tokens


class ReplaySource(DraftSource):
    """Drafts made of the known output of each request by a function (rest, context) -> Draft."""

    def __init__(
        self,
        outputs: dict[str, list[int]],
        make: Callable[[list[int], DraftContext], Draft] | None = None,
        num_tokens: int = 8,
        name: str = "replay",
    ) -> None:
        self.name = name
        self.max_draft_tokens = 64
        self.outputs = outputs
        self.make = make or (lambda rest, context: Draft(rest[:num_tokens]))
        self.outcomes: list[Outcome] = []
        self.released: list[str] = []
        self.finished: list[str] = []

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for context in contexts:
            output = context.token_ids[context.num_prompt_tokens :].tolist()
            known = self.outputs.get(context.request_id, [])
            assert output == known[: len(output)], "the text differs from plain decoding"
            drafts.append(self.make(known[len(output) :], context))
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes += outcomes

    def finish(self, context: DraftContext) -> None:
        self.finished.append(context.request_id)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class SubmitAll(FixedLength):
    """A plan that submits the first source's whole draft, so that tests choose what happens."""

    def budgets(self, source: DraftSource, view: StepView) -> list[int]:
        return [max(0, min(cap(ask, source), view.row_budget)) for ask in view.asks]


def make_engine(
    sources: Sequence[DraftSource] = (), target: FakeTarget | None = None, **options
) -> Engine:
    options.setdefault("tokenizer", ALPHABET)
    options.setdefault("eos_token_ids", (0,))
    options.setdefault("planner", SubmitAll())
    options.setdefault("strict_sources", True)  # what a source asserts must fail the test
    options.setdefault("kv_cache_tokens", 4096)
    return Engine(target or FakeTarget(len(ALPHABET.pieces)), sources, **options)


def run(
    engine: Engine,
    requests: dict[str, tuple[list[int], SamplingParams]],
    max_steps: int = 5000,
    abort: tuple[str, int] | None = None,
) -> dict[str, RequestOutput]:
    """Decode all requests to their end; every step's integrity and every stream are checked.

    `abort` names a request and the step before which it is aborted.
    """
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    return drain(engine, max_steps, abort)


def drain(
    engine: Engine, max_steps: int = 5000, abort: tuple[str, int] | None = None
) -> dict[str, RequestOutput]:
    results: dict[str, RequestOutput] = {}
    streams: dict[tuple[str, int], list] = {}
    for step in range(max_steps):
        if abort is not None and step == abort[1]:
            engine.abort(abort[0])
        for chunk in engine.step():
            streams.setdefault((chunk.request_id, chunk.index), []).append(chunk)
            if chunk.result is not None:
                results[chunk.request_id] = chunk.result
        engine.check_integrity()
        if not engine.has_work:
            break
    else:
        raise AssertionError(f"not done after {max_steps} steps")
    for (request_id, index), chunks in streams.items():
        output = results[request_id].outputs[index]
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert [i for chunk in chunks for i in chunk.token_ids] == output.token_ids
        assert [s for chunk in chunks for s in chunk.token_sources] == output.token_sources
        told = [c for chunk in chunks for c in chunk.token_confidences]
        assert told == output.token_confidences and len(told) == len(output.token_ids)
        assert [chunk.finish_reason is not None for chunk in chunks].count(True) == 1
        assert chunks[-1].finish_reason == output.finish_reason is not None
        if output.logprobs is not None:
            assert [e for c in chunks for e in c.logprobs or []] == output.logprobs
    assert engine.arena.num_free_pages == engine.arena.num_pages
    return results
