"""The tokenizer inside a GGUF file, built for the `tokenizers` library."""

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from outrider.target.gguf import GGUFFile, chat_template, named_specials
from outrider.tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # kinds of token, as llama.cpp numbers them
SPACE = "▁"  # how sentencepiece writes a space

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
# How text is cut before merging, by `tokenizer.ggml.pre`; None is GPT-2's own rule. SmolLM cuts
# every digit first: without that, the space before a number ends up in the wrong token.
WORDS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "qwen2": QWEN2_WORDS,
}
SINGLE_DIGITS = {"smollm"}


def is_known(file: GGUFFile) -> bool:
    """Whether `build_tokenizer` knows this kind of tokenizer."""
    kind = file.metadata.get("tokenizer.ggml.model")
    pre = file.metadata.get("tokenizer.ggml.pre")
    return kind == "llama" or (kind == "gpt2" and pre in WORDS)


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """Vocabulary, merges, special tokens and chat template of the file."""
    byte_level = file.metadata["tokenizer.ggml.model"] == "gpt2"
    backend = _byte_level(file) if byte_level else _sentencepiece(file)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    marked = [(_spelled(t), k) for t, k in zip(tokens, kinds, strict=False)]
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in marked if k == CONTROL]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in marked if k == USER_DEFINED])
    specials = dict(named_specials(file))
    around = _added_around(file)
    if around:
        ids = {
            specials[name]: file.metadata[f"tokenizer.ggml.{name[:3]}_token_id"] for name in around
        }
        start = f"{specials['bos_token']} " if "bos_token" in around else ""
        end = f" {specials['eos_token']}" if "eos_token" in around else ""
        template = processors.TemplateProcessing(
            single=f"{start}$A{end}",
            pair=f"{start}$A{end} {start}$B:1{end}",
            special_tokens=list(ids.items()),
        )
        backend.post_processor = template
    return Tokenizer(backend, specials, chat_template(file))


def _added_around(file: GGUFFile) -> list[str]:
    """Which of the special tokens go around a text."""
    # Files older than the flag: llama.cpp adds BOS to a sentencepiece vocabulary.
    bos_default = file.metadata["tokenizer.ggml.model"] == "llama"
    flags = {
        "bos_token": file.metadata.get("tokenizer.ggml.add_bos_token", bos_default),
        "eos_token": file.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    named = dict(named_specials(file))
    return [name for name, added in flags.items() if added and name in named]


def _byte_level(file: GGUFFile) -> Backend:
    vocab = {token: i for i, token in enumerate(file.metadata["tokenizer.ggml.tokens"])}
    merges: list[Any] = [tuple(m.split(" ")) for m in file.metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    pre = file.metadata["tokenizer.ggml.pre"]
    words = WORDS[pre]
    steps: list[Any] = []
    if pre in SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if words is not None:
        steps.append(pre_tokenizers.Split(Regex(words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def _sentencepiece(file: GGUFFile) -> Backend:
    """Byte-pair merging with fallback to bytes, its merges recovered from the vocabulary."""
    tokens = [_spelled(token) for token in file.metadata["tokenizer.ggml.tokens"]]
    unknown = dict(named_specials(file)).get("unk_token")
    gemma = file.architecture.startswith("gemma")
    if gemma:  # its scores do not follow the order of its merges, its ids do
        scores = [float(-i) for i in range(len(tokens))]
    else:
        scores = file.metadata["tokenizer.ggml.scores"]
    merges: list[Any] = recovered_merges(tokens, scores)
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", not gemma)
    decode: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        cut = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
        backend.pre_tokenizer = cut  # pyright: ignore[reportAttributeAccessIssue]
        decode.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Sequence(decode)  # pyright: ignore[reportAttributeAccessIssue]
    return backend


def recovered_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two others, best token first, longest left part first."""
    vocab = set(tokens)
    found = [
        (-score, -cut, cut - len(token), token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    found.sort(key=lambda entry: entry[:3])
    return [(left, right) for _, _, _, left, right in found]


def _spelled(token: str) -> str:
    """Files write tokens of several spaces as spaces, where the vocabulary means ▁."""
    return SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token
