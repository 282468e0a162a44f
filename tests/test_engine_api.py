"""The offline API: what goes in, what comes out, what is refused."""

import ast
import dataclasses
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fakes import ALPHABET, FakeTarget, FakeTokenizer
from toy_models import toy_model, toy_tokenizer

import outrider
from outrider import LLM, Draft, DraftSource, SamplingParams, ScriptedSource
from outrider.drafting.build import METHODS, PLANNED
from outrider.errors import ConfigError, PromptError, SamplingError

VOCAB = len(ALPHABET.pieces)


def make_llm(**options) -> LLM:
    options.setdefault("target", FakeTarget(VOCAB))
    options.setdefault("tokenizer", ALPHABET)
    options.setdefault("kv_cache_tokens", 2048)
    return LLM(**options)


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **changes})


def idle(llm: LLM) -> bool:
    llm.engine.check_integrity()
    return not llm.engine.has_work and llm.engine.arena.num_free_pages == llm.engine.arena.num_pages


def test_public_names_are_this_list():
    assert outrider.__all__ == [
        *("LLM", "CompletionOutput", "ConfigError", "Draft", "DraftContext", "DraftSource"),
        *("KVFull", "Logprob", "MissingDependency", "ModelError", "Outcome", "OutriderError"),
        *("PromptError", "RequestMetrics", "RequestOutput", "SamplingError", "SamplingParams"),
        *("ScriptedSource", "SourceError", "SourceMetrics", "SpeculativeMetrics", "StreamChunk"),
        *("TableError", "Terms", "TokenizerMismatch", "UserError"),
    ]
    for name in outrider.__all__:
        assert getattr(outrider, name).__name__ == name
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = outrider.Nothing


def test_type_checkers_see_every_public_name():
    tree = ast.parse(Path(outrider.__file__).read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(outrider.__all__) <= imported


def test_importing_outrider_imports_nothing_heavy():
    code = (
        "import outrider, sys; from outrider import SamplingParams, PromptError;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_outside_drafting_no_line_names_a_method():
    names = [*METHODS, *PLANNED, "draft_model"]
    quoted = re.compile(rf"""["']({"|".join(names)})["']""")
    package = Path(outrider.__file__).parent
    files = [package / "llm.py", *package.glob("engine/*.py"), *package.glob("policy/*.py")]
    assert len(files) > 12
    for file in [*files, *package.glob("target/*.py")]:
        assert not quoted.findall(file.read_text()), file


def test_every_way_to_give_a_prompt_is_the_same_prompt():
    llm = make_llm()
    ids = ALPHABET.encode("hello.")
    ways = ["hello.", {"prompt": "hello."}, {"prompt_token_ids": ids}]
    results = llm.generate(ways, params())
    assert [result.prompt for result in results] == ["hello.", "hello.", None]
    assert [result.prompt_token_ids for result in results] == [ids] * 3
    assert len({result.outputs[0].text for result in results}) == 1
    alone = llm.generate("hello.", params())
    assert len(alone) == 1 and alone[0].outputs[0].text == results[0].outputs[0].text
    assert llm.generate([], params()) == []


def test_defaults_are_temperature_1_and_16_tokens():
    llm = make_llm(seed=3, eos_token_ids=())
    found = [llm.generate("hello", None)[0].outputs[0].token_ids for _ in range(2)]
    assert [len(ids) for ids in found] == [16, 16]
    assert found[0] != found[1]
    again = make_llm(seed=3, eos_token_ids=()).generate("hello")
    assert again[0].outputs[0].token_ids == found[0]


def test_one_sampling_params_per_prompt():
    results = make_llm().generate(["ab", "ab"], [params(max_tokens=3), params(max_tokens=5)])
    assert [len(result.outputs[0].token_ids) for result in results] == [3, 5]


def test_chat_renders_the_template_and_takes_many_conversations():
    llm = make_llm()
    one = [{"role": "user", "content": "hi there"}]
    result = llm.chat(one, params())[0]
    assert result.prompt == "user, hi there\n"
    assert result.outputs == llm.generate("user, hi there\n", params())[0].outputs
    assert len(llm.chat([one, one, one], params())) == 3


def test_stream_joins_to_what_generate_gives():
    llm = make_llm()
    wanted = params(n=2, temperature=0.8, seed=4, logprobs=1)
    result = llm.generate("the abc abc", wanted)[0]
    chunks = list(llm.stream("the abc abc", wanted))
    for output in result.outputs:
        mine = [chunk for chunk in chunks if chunk.index == output.index]
        assert "".join(chunk.text for chunk in mine) == output.text
        assert [token for chunk in mine for token in chunk.token_ids] == output.token_ids
        assert [entry for chunk in mine for entry in chunk.logprobs or []] == output.logprobs
        assert [chunk.finish_reason for chunk in mine][-1] == output.finish_reason == "length"
    assert [chunk.result is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].result.outputs == result.outputs
    assert idle(llm)


def test_a_closed_stream_stops_its_work_and_frees_its_memory():
    llm = make_llm()
    expected = llm.generate("abc", params())[0].outputs
    stream = llm.stream("abc", params(n=2, max_tokens=200))
    next(stream)
    forwards = llm.target.num_forwards
    stream.close()
    stream.close()
    assert llm.engine.arena.num_free_pages == llm.engine.arena.num_pages
    assert llm.generate("abc", params())[0].outputs == expected
    assert llm.target.num_forwards < forwards + 30
    assert idle(llm)


def test_a_stream_never_begun_costs_nothing():
    llm = make_llm()
    stream = llm.stream("abc", params())
    del stream
    assert idle(llm)


def test_streams_and_batches_may_interleave():
    llm = make_llm()
    texts = [llm.generate(p, params(max_tokens=50))[0].outputs[0].text for p in ("abc", "xyz")]
    one, two = (llm.stream(prompt, params(max_tokens=50)) for prompt in ("abc", "xyz"))
    found = [next(one).text, next(two).text]
    assert len(llm.generate(["q"] * 3, params())) == 3
    found[1] += "".join(chunk.text for chunk in two)
    found[0] += "".join(chunk.text for chunk in one)
    assert found == texts
    assert idle(llm)


@pytest.mark.parametrize("config", ["auto", None, {"method": "ngram", "prompt_lookup_max": 3}])
def test_speculation_never_changes_the_text(config):
    wanted = [params(temperature=t, seed=1, max_tokens=60) for t in (0.0, 0.7)]
    prompts = ["abc abc abc abc", "the end. the end. the"]
    plain = make_llm(speculative_config=None).generate(prompts, wanted)
    found = make_llm(speculative_config=config).generate(prompts, wanted)
    assert [r.outputs[0].text for r in found] == [r.outputs[0].text for r in plain]


def test_a_prediction_of_the_user_is_drafted():
    llm = make_llm()
    letters = params(max_tokens=60, allowed_token_ids=range(1, 27))  # one way to tokenise
    plain = llm.generate("tell", letters)[0].outputs[0]
    for prediction in (plain.text, plain.token_ids):
        wanted = dataclasses.replace(letters, prediction=prediction)
        output = llm.generate("tell", wanted)[0].outputs[0]
        assert output.text == plain.text
        assert output.token_sources.count("predicted") > 20


@pytest.mark.parametrize("rule", ["invariant", "rejection", "standard", "block"])
def test_every_accept_rule_is_greedy_when_asked(rule):
    source = ScriptedSource(lambda context: Draft([1, 2, 3]))
    plain = make_llm(speculative_config=None).generate("abc", params())[0]
    config = [{"method": "lookup", "rejection_sample_method": rule}, source]
    assert make_llm(speculative_config=config).generate("abc", params())[0].outputs[
        0
    ].token_ids == (plain.outputs[0].token_ids)


def test_plain_and_speculative_share_a_target():
    fast = make_llm()
    plain = LLM(
        target=fast.target, tokenizer=ALPHABET, speculative_config=None, kv_cache_tokens=512
    )
    first = fast.stream("abc abc abc", params(max_tokens=60))
    text = next(first).text
    expected = plain.generate("abc abc abc", params(max_tokens=60))[0].outputs[0].text
    assert text + "".join(chunk.text for chunk in first) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "empty"),
        ([""], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [VOCAB]}, f"token id {VOCAB} is outside"),
        ("a" * 300, "300 tokens"),
        ([7], "a prompt must be text"),
        ([1, 2], "a prompt must be text"),
        ({"text": "a"}, "keys"),
        ({"prompt": "a", "more": 1}, "keys"),
        ({"prompt": 5}, "must be text"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(prompts, message):
    llm = make_llm()
    with pytest.raises(PromptError, match=message):
        llm.generate(prompts, params())
    with pytest.raises(PromptError, match=message):
        llm.generate(["fine", *(prompts if isinstance(prompts, list) else [prompts])], params())
    assert idle(llm) and llm.target.num_forwards == 0


@pytest.mark.parametrize("messages", [[], ["a"], "abc", [["a"]], [[]], [3]])
def test_bad_conversations_are_refused(messages):
    llm = make_llm()
    if messages == []:
        assert llm.chat(messages) == []
        return
    with pytest.raises(PromptError, match=r"messages must be a list|a conversation must be"):
        llm.chat(messages)


def test_bad_parameters_are_refused():
    llm = make_llm()
    with pytest.raises(PromptError, match="prompts must be a list, got 7"):
        llm.generate(7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SamplingError, match="2 prompts need 2 sampling_params, got 1"):
        llm.generate(["a", "b"], [params()])
    with pytest.raises(SamplingError, match="must be SamplingParams"):
        llm.generate("a", {"temperature": 1})  # pyright: ignore[reportArgumentType]
    with pytest.raises(SamplingError, match=str(VOCAB)):
        llm.stream("a", params(allowed_token_ids=[VOCAB]))
    with pytest.raises(ConfigError, match="max_num_seqs"):
        make_llm(max_num_seqs=0)
    with pytest.raises(ConfigError, match="method"):
        make_llm(speculative_config={"method": "nothing"})
    with pytest.raises(ConfigError, match="num_threads"):
        make_llm(num_threads=0)
    assert idle(llm)


def test_without_a_tokenizer_only_ids_are_taken():
    llm = make_llm(tokenizer=None)
    assert len(llm.generate({"prompt_token_ids": [1, 2]}, params())[0].outputs[0].token_ids) == 20
    with pytest.raises(PromptError, match="without a tokenizer"):
        llm.generate("abc", params())
    with pytest.raises(PromptError, match="needs a tokenizer"):
        llm.chat([{"role": "user", "content": "a"}], params())


def test_interrupted_generation_leaves_the_engine_idle():
    class Interrupting(FakeTokenizer):
        def decode(self, token_ids, skip_special_tokens=True):
            raise KeyboardInterrupt

    llm = make_llm(tokenizer=Interrupting(ALPHABET.pieces, [0]))
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc", params(logprobs=1))
    assert llm.engine.arena.num_free_pages == llm.engine.arena.num_pages
    assert len(llm.generate("abc", params())[0].outputs[0].token_ids) == 20


def test_progress_is_shown_when_asked(capsys):
    make_llm().generate(["a", "b"], params(), use_tqdm=True)
    assert "2/2" in capsys.readouterr().out


def test_threads_take_turns_and_all_get_their_own_answers():
    llm = make_llm()
    texts = ["abc abc", "the end. the", "xyz", "hello there", "q"]
    wanted = params(max_tokens=60)
    plain = [llm.generate(text, wanted)[0].outputs[0].text for text in texts]

    def streamed(text: str) -> str:
        return "".join(chunk.text for chunk in llm.stream(text, wanted))

    def generated(text: str) -> str:
        return llm.generate([text, "abc"], wanted)[0].outputs[0].text

    with ThreadPoolExecutor(5) as pool:
        for _ in range(4):
            for each in (generated, streamed):
                assert list(pool.map(each, texts)) == plain
    llm.engine.step()  # what was aborted last was told to nobody
    assert idle(llm)


def test_two_llms_on_one_target_take_turns_in_threads():
    one = make_llm()
    two = make_llm(target=one.target, speculative_config=None)
    wanted = params(max_tokens=80)
    plain = two.generate("abc abc", wanted)[0].outputs[0].text
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            found = pool.map(lambda llm: llm.generate("abc abc", wanted), (one, two))
            assert [results[0].outputs[0].text for results in found] == [plain] * 2


NO_INTEGER: list = ["5", [1], 1.5, True, {}, 10**30, 10**5000, 0]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_model_len", NO_INTEGER),
        ("max_num_seqs", NO_INTEGER),
        ("max_num_batched_tokens", NO_INTEGER),
        ("kv_cache_tokens", NO_INTEGER),
        ("dtype", [["x"], 5, None, True]),
        ("device", [True, 1.5, [1], None]),
        ("seed", [[1], "cuda", 1.5, True, 10**30]),
        ("deterministic", ["5", 1, []]),
        ("eos_token_ids", ["2", 1.5, True, [1.5], ["a"], {}, [-1], [None]]),
        ("tokenizer", ["name"]),
        ("target", ["name", 5, FakeTarget]),
        ("speculative_config", [5, 1.5, True, {1}, b"auto", object(), {1: 2}, [None], [[]]]),
    ],
)
def test_an_argument_of_a_wrong_type_or_size_is_one_sentence(name, values):
    for value in values:
        with pytest.raises(ConfigError) as error:
            make_llm(**{name: value})
        assert len(str(error.value)) < 500 and "\n" not in str(error.value)
        assert name in str(error.value) or name == "speculative_config"


def test_a_wrong_config_is_refused_before_a_model_is_looked_for():
    for config in ({"method": "lokup"}, {"method": "lookup", "min_survival": "5"}, [{"a": 1}]):
        with pytest.raises(ConfigError):
            LLM("no/such/model", speculative_config=config)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM("no/such/model", max_num_seqs=0)


class FeatureReader(DraftSource):
    """Wants the features of both layers: 2 × 4 numbers of 4 bytes a token, beside 8 bytes of KV."""

    name = "reader"
    target_layer_ids = (0, 1)

    def propose(self, contexts, budgets):
        return [Draft() for _ in contexts]


@pytest.mark.parametrize(
    ("sources", "keeps", "token_bytes"),
    [([], True, 8), ([FeatureReader()], True, 40), ([FeatureReader()], False, 8),
     ([FeatureReader(), FeatureReader()], True, 40)],
)  # fmt: skip
def test_features_that_are_kept_count_as_memory(monkeypatch, sources, keeps, token_bytes):
    monkeypatch.setattr("outrider.llm._memory_bytes", lambda _: 4096 * token_bytes)
    monkeypatch.setattr("outrider.llm._free_bytes", lambda _: 4 * 512 * token_bytes)
    options = {"speculative_config": sources or None, "enable_prefix_caching": keeps}
    with pytest.raises(ConfigError, match=f"at most 4096, .* {token_bytes} bytes a token"):
        make_llm(**options, kv_cache_tokens=4097)
    assert make_llm(**options, kv_cache_tokens=4096).engine.arena.num_pages == 256
    # A quarter of what is free holds 512 tokens.
    assert make_llm(**options, kv_cache_tokens=None).engine.arena.num_pages == 32


@pytest.mark.parametrize("token", [-1, 39])
def test_an_id_outside_the_vocabulary_is_refused_wherever_it_is_given(token):
    llm = make_llm()
    for given in (token, [1, token]):
        with pytest.raises(ConfigError, match=f"eos_token_ids.*got {token}"):
            make_llm(eos_token_ids=given)
    with pytest.raises(PromptError, match=f"token id {token}|got {token}"):
        llm.generate({"prompt_token_ids": [1, token]})
    ids = ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "prediction")
    for name in (*ids, "logit_bias"):
        given = {token: 1.0} if name == "logit_bias" else [1, token]
        with pytest.raises(SamplingError, match=f"{name}.* {token}"):
            llm.generate({"prompt_token_ids": [1]}, SamplingParams(**{name: given}))
    assert idle(llm)


def test_an_end_that_only_a_file_names_outside_the_vocabulary_is_left_out():
    tokenizer = FakeTokenizer([b"a", b"b"])
    for token, kept in ((1, (1,)), (39, ()), (-1, ()), (None, ())):
        tokenizer.eos_token_id = token
        assert make_llm(tokenizer=tokenizer).eos_token_ids == kept
    model = toy_model("gemma2")
    model.generation_config.eos_token_id = [2, 96, 10**6]
    llm = LLM(model, tokenizer=toy_tokenizer(), kv_cache_tokens=64, max_model_len=16)
    assert llm.eos_token_ids == (2,)
    form = SamplingParams(structured_outputs={"regex": "[a-c]{2}"}, max_tokens=5)
    [result] = llm.generate("a", form)
    assert len(result.outputs[0].text) == 2


def test_texts_longer_than_the_target_takes_are_refused():
    target = FakeTarget(39, max_model_len=64)
    assert make_llm(target=target, max_model_len=64).engine.max_model_len == 64
    with pytest.raises(ConfigError, match=r"max_model_len must be at most the 64 .* got 65"):
        make_llm(target=target, max_model_len=65)


def test_one_id_may_end_a_text():
    assert make_llm(eos_token_ids=2).eos_token_ids == (2,)
    assert make_llm(eos_token_ids=np.array([2, 3])).eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    "prompt",
    [
        *(
            {"prompt_token_ids": ids}
            for ids in (5, [[1], [2, 3]], "ab", {1}, [None], 1.5, [10**30])
        ),
        *({"prompt_token_ids": ids} for ids in ([1, "a"], [True], [[]], {1: 2}, 1.5, object())),
        {1: 2, "a": 3},
        {"prompt": 5, "prompt_token_ids": [1]},
        {},
    ],
)
def test_a_prompt_of_a_wrong_type_is_one_sentence(prompt):
    llm = make_llm()
    for call in (llm.generate, llm.stream):
        with pytest.raises(PromptError) as error:
            call(prompt)
        assert len(str(error.value)) < 300
    assert idle(llm)
