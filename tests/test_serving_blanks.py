"""Tokenizers whose decoders strip the blank that a text begins with, as those of Llama 2."""

import pytest
import tokenizers
from fakes import FakeTarget
from serving_cases import CHAT, COMPLETIONS, asked, make_llm, serving, streamed
from tokenizers import AddedToken, decoders, models, normalizers

from outrider import SamplingParams
from outrider.tokenizer import Tokenizer

WORDS = ["<eos>", "<unk>", "▁the", "▁cat", "▁sat", "on", "▁mat", "!", "▁", *"thecasonm"]
WORDS = list(dict.fromkeys([*WORDS, *(f"<0x{byte:02X}>" for byte in "é日".encode())]))
ASK = {"temperature": 1, "seed": 5, "max_tokens": 20, "ignore_eos": True}


def make_tokenizer() -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    model = models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return Tokenizer(backend, {"eos_token": "<eos>"}, template)


TOKENIZER = make_tokenizer()
SAT = WORDS.index("▁sat")
BLANKS = {str(SAT): 6.0, str(WORDS.index("▁mat")): 6.0}  # words that begin with one


def make_blank_llm():
    return make_llm(target=FakeTarget(len(WORDS), max_model_len=1024), tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    "prompt", ["the cat", "the é日", "日", " ", [SAT], [0, SAT, 0, 0, 0, 0], [0], [0, 0, 0, 0, 0]]
)
@pytest.mark.parametrize("skips", [True, False])
def test_the_output_is_what_it_adds_to_the_text_of_the_prompt(prompt, skips):
    llm = make_blank_llm()
    asked_for = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    for seed in range(12):
        bias = {int(token): value for token, value in BLANKS.items()}
        params = SamplingParams(
            seed=seed, max_tokens=8, ignore_eos=True, logit_bias=bias, skip_special_tokens=skips
        )
        [found] = llm.generate(asked_for, params)
        ids, [output] = list(found.prompt_token_ids), found.outputs
        before = TOKENIZER.decode(ids, skips)
        after = TOKENIZER.decode([*ids, *output.token_ids], skips)
        if after.startswith(before) and not after.endswith("\ufffd"):
            assert output.text == after[len(before) :]


def test_tokens_offsets_and_echo_are_those_of_the_text():
    body = {"prompt": "the cat", **ASK, "logit_bias": BLANKS | {"0": -100.0}}
    with serving(make_blank_llm()) as client:
        [choice] = asked(client, COMPLETIONS, **body, logprobs=2)["choices"]
        parts = [c["choices"][0] for c in streamed(client, COMPLETIONS, **body, logprobs=2)]
        [echo] = asked(client, COMPLETIONS, **body, echo=True)["choices"]
        ids = TOKENIZER.encode("the cat")
        [same] = asked(client, COMPLETIONS, **body | {"prompt": ids}, echo=True)["choices"]
        messages = [{"role": "user", "content": "the cat"}]
        chat = {name: value for name, value in body.items() if name != "prompt"}
        [said] = asked(client, CHAT, messages=messages, **chat, logprobs=True)["choices"]
    text, told = choice["text"], choice["logprobs"]
    assert text.count(" ") > 5 and "\ufffd" not in "".join(told["tokens"])
    assert "".join(told["tokens"]) == text == "".join(part["text"] for part in parts)
    for name, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert text[offset:].startswith(name)
    for field in ("tokens", "text_offset"):
        assert [one for part in parts for one in part["logprobs"][field]] == told[field]
    assert echo["text"] == same["text"] == "the cat" + text
    names = [one["token"] for one in said["logprobs"]["content"]]
    assert "".join(names) == said["message"]["content"] == text
