"""Rules of a JSON policy: what applies, what is refused and where, how they are exchanged."""

import json
import os
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from outrider.checks import INT32_MAX
from outrider.cli.main import app
from outrider.errors import ConfigError
from outrider.policy.live import KEPT, LivePolicy, PolicyFile
from outrider.policy.restrict import Allowed, LoadFacts, RequestFacts
from outrider.policy.rule_document import (
    BOOLEANS,
    COMPARISONS,
    MAX_RULES,
    NUMBERS,
    TEXTS,
    compile_policy,
    load_policy,
    read_facts,
    read_json,
)
from outrider.policy.rule_schema import policy_schema
from outrider.policy.rules import LOAD_FACTS


def policy(*rules: dict) -> dict:
    return {"version": 1, "rules": list(rules)}


def allowed(document: dict, **facts) -> Allowed:
    asked, rules = read_facts(facts), compile_policy(document)
    found, told = rules.restrict(*asked), rules.explain(*asked)
    assert found == told.allowed
    return found


def fires(when: dict, **facts) -> bool:
    return allowed(policy({"when": when, "then": {"num_draft_tokens": 3}}), **facts) != Allowed()


@pytest.mark.parametrize(
    ("relation", "below", "equal", "above"),
    [
        ("above", False, False, True),
        ("at_least", False, True, True),
        ("below", True, False, False),
        ("at_most", True, True, False),
    ],
)
def test_comparisons_at_their_limits(relation, below, equal, above):
    for fact in NUMBERS:
        value, around = (0.5, 0.25) if NUMBERS[fact][1] == 1 else (100, 1)
        when = {fact: {relation: value}}
        found = [fires(when, **{fact: value + around * i}) for i in (-1, 0, 1)]
        assert found == [below, equal, above], fact
    when = {"health": {"lookup": {relation: 0.5}}}
    found = [fires(when, health={"lookup": 0.5 + 0.25 * i}) for i in (-1, 0, 1)]
    assert found == [below, equal, above]


def test_numbers_texts_and_booleans_are_compared_as_they_are_given():
    assert fires({"context_len": 7}, context_len=7)
    assert not fires({"context_len": 7}, context_len=8)
    assert fires({"context_len": {"above": 7, "below": 9}}, context_len=8)
    assert not fires({"context_len": {"above": 7, "below": 9}}, context_len=9)
    for fact in TEXTS:
        assert fires({fact: "chat"}, **{fact: "chat"})
        assert not fires({fact: "chat"}, **{fact: "chatter"})
        assert fires({fact: ["code", "chat"]}, **{fact: "chat"})
        assert not fires({fact: []}, **{fact: "chat"})
        assert fires({fact: ""})
    assert fires({"has_prediction": True}, has_prediction=True)
    assert fires({"has_prediction": False})
    assert not fires({"kind": "code", "priority": 0}, kind="code", priority=1)


def test_a_source_of_which_nothing_is_known_is_well():
    assert not fires({"health": {"lookup": {"below": 0.9}}}, health={"table": 0.0})
    assert fires({"health": {"lookup": {"at_least": 1}}})


def test_all_rules_that_hold_apply_and_only_ever_narrow():
    document = policy(
        {"when": {"kind": "code"}, "then": {"sources": ["table", "lookup", "dspark"]}},
        {"when": {"batch_size": {"at_least": 8}}, "then": {"num_draft_tokens": 4}},
        {"when": {"context_len": {"above": 4096}}, "then": {"forbid": ["dspark"]}},
        {"when": {"kv_usage": {"above": 0.9}}, "then": {"sources": ["lookup", "dspark"]}},
        {"when": {"num_waiting": {"above": 50}}, "then": {"num_draft_tokens": 2, "forbid": ["x"]}},
    )
    assert allowed(document) == Allowed()
    assert allowed(document, kind="code") == Allowed(("table", "lookup", "dspark"))
    assert allowed(document, batch_size=8, num_waiting=51) == Allowed(None, 2, frozenset("x"))
    found = allowed(document, kind="code", kv_usage=0.95, context_len=5000, batch_size=8)
    assert found == Allowed(("lookup", "dspark"), 4, frozenset(["dspark"]))
    names = ["table", "lookup", "dspark", "other"]
    assert [name for name in names if found.allows(name)] == ["lookup"]


def test_lists_with_nothing_in_common_leave_plain_decoding():
    document = policy({"then": {"sources": ["a"]}}, {"then": {"sources": ["b"]}})
    assert allowed(document).sources == ()
    assert allowed(policy({"then": {"sources": []}})).sources == ()


def test_the_last_rule_ends_the_search_only_where_it_applies():
    document = policy(
        {"when": {"tag": "legal"}, "then": {"sources": ["lookup"]}, "last": True},
        {"then": {"num_draft_tokens": 5}},
    )
    assert allowed(document, tag="legal") == Allowed(("lookup",))
    assert allowed(document) == Allowed(None, 5)


def test_an_explanation_says_why():
    document = policy(
        {"name": "long", "when": {"context_len": {"above": 9}}, "then": {"num_draft_tokens": 1}},
        {"when": {"kind": ["a", "b"]}, "then": {"num_draft_tokens": 2}, "last": True},
        {"name": "ill", "when": {"health": {"x": {"below": 0.5}}}, "then": {"forbid": ["x"]}},
    )
    explained = compile_policy(document).explain(*read_facts({"context_len": 9, "kind": "b"}))
    assert [verdict.reason for verdict in explained.verdicts] == [
        "context_len is 9, expected above 9",
        "",
        "rule 1 is the last",
    ]
    assert explained.applied == ["rule 1"]
    explained = compile_policy(document).explain(*read_facts({"kind": "c"}))
    assert [verdict.reason for verdict in explained.verdicts][1:] == [
        "kind is 'c', expected one of ['a', 'b']",
        "health.x is 1, expected below 0.5",
    ]


FAULTS = [
    ([], r"\$ must be an object, got \[\]"),
    ({"rules": []}, r"\$ lacks the key 'version'"),
    ({"version": 1}, r"\$ lacks the key 'rules'"),
    ({"version": 2, "rules": []}, r"\$\.version must be 1, got 2"),
    ({"version": "1", "rules": []}, r"\$\.version must be an integer"),
    ({"version": 1, "rules": {}}, r"\$\.rules must be a list, got {}"),
    ({"version": 1, "rules": [], "rulez": 0}, r"\$ has the unknown key 'rulez', expected about"),
    (policy({}), r"\$\.rules\[0\] lacks the key 'then'"),
    (policy({"then": {}}), r"\$\.rules\[0\]\.then must hold sources, forbid or num_draft_tokens"),
    (policy({"then": {"source": ["a"]}}), r"\$\.rules\[0\]\.then has the unknown key 'source'"),
    (policy({"then": {"sources": "a"}}), r"then\.sources must be a list of names of sources"),
    (policy({"then": {"forbid": ["a", 1]}}), r"then\.forbid\[1\] must be text, got 1"),
    (policy({"then": {"num_draft_tokens": -1}}), r"then\.num_draft_tokens must be an integer in"),
    (policy({"then": {"num_draft_tokens": None}}), r"then\.num_draft_tokens must be an integer"),
    (policy({"then": {"num_draft_tokens": True}}), r"then\.num_draft_tokens must be an integer"),
    (policy({"then": {"sources": []}, "last": 1}), r"\$\.rules\[0\]\.last must be True or False"),
    (policy({"then": {"sources": []}, "name": 3}), r"\$\.rules\[0\]\.name must be text, got 3"),
]
WHEN_FAULTS = [
    ("tag", r"\$\.rules\[1\]\.when must be an object, got 'tag'"),
    ({"contxt": 1}, r"\$\.rules\[1\]\.when has the unknown key 'contxt', expected batch_size, "),
    ({"context_len": "7"}, r"when\.context_len must be a number, got '7'"),
    ({"context_len": -1}, r"when\.context_len must be in \[0\.0, .*\], got -1"),
    ({"kv_usage": {"above": 70}}, r"\$\.rules\[1\]\.when\.kv_usage\.above must be in \[0\.0, 1\.0"),
    ({"kv_usage": {}}, r"when\.kv_usage must hold one of above, at_least, below, at_most"),
    ({"kv_usage": {"over": 1}}, r"when\.kv_usage has the unknown key 'over', expected above, "),
    ({"kv_usage": float("nan")}, r"when\.kv_usage must be in \[0\.0, 1\.0\], got nan"),
    ({"kind": 3}, r"when\.kind must be text or a list of texts, got 3"),
    ({"kind": ["a", None]}, r"when\.kind\[1\] must be text, got None"),
    ({"has_prediction": "yes"}, r"when\.has_prediction must be True or False, got 'yes'"),
    ({"health": 0.5}, r"when\.health must be an object, got 0\.5"),
    ({"health": {"x": {"below": 2}}}, r"when\.health\.x\.below must be in \[0\.0, 1\.0\], got 2"),
]


@pytest.mark.parametrize(("document", "message"), FAULTS)
def test_faults_are_told_with_their_place(document, message):
    with pytest.raises(ConfigError, match=message):
        compile_policy(document)


@pytest.mark.parametrize(("when", "message"), WHEN_FAULTS)
def test_faults_in_conditions_are_told_with_their_place(when, message):
    fine = {"then": {"sources": []}}
    with pytest.raises(ConfigError, match=message):
        compile_policy(policy(fine, {"when": when, "then": {"sources": []}}))


def test_sources_that_are_not_there_are_refused_where_it_is_known_which_are():
    document = policy(
        {"then": {"sources": ["lookup"]}},
        {"when": {"health": {"remote": {"below": 0.9}}}, "then": {"forbid": ["remote"]}},
    )
    compile_policy(document)
    with pytest.raises(ConfigError, match=r"\$\.rules\[1\]\.when\.health\.remote: no source is"):
        compile_policy(document, ["lookup", "table"])
    document = policy({"then": {"sources": ["lookup", "lokup"]}})
    expected = r"then\.sources\[1\]: no source is called 'lokup'; sources: lookup, table"
    with pytest.raises(ConfigError, match=expected):
        compile_policy(document, ["lookup", "table"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the policy is no JSON: "),
        (b"\xff\xfe{", "the policy is no JSON: "),
        ('{"version": 1, "version": 1}', "holds the key 'version' twice in one object"),
        ('{"version": NaN}', "holds NaN, which is no JSON number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"version": ' + "1" * 5000 + "}", "integer of more than 4300 digits"),
        (" " * (1 << 20) + "{}", "at most 1048576 bytes, got 1048578"),
    ],
)
def test_what_is_no_json_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read_json(text)


def test_too_many_rules_are_refused():
    rule = {"then": {"sources": []}}
    compile_policy(policy(*[rule] * MAX_RULES))
    with pytest.raises(ConfigError, match=r"\$\.rules holds 101 entries, at most 100"):
        compile_policy(policy(*[rule] * (MAX_RULES + 1)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["version", "rules", "when", "then", "context_len", "above", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(rules=JSON, when=JSON, then=JSON)
def test_no_document_does_worse_than_being_refused(rules, when, then):
    for document in (rules, policy({"when": when, "then": then}), {"version": 1, "rules": rules}):
        try:
            compile_policy(document)
        except ConfigError as error:
            assert str(error).startswith("$")


CONDITIONS = st.fixed_dictionaries(
    {},
    optional={
        "context_len": st.dictionaries(st.sampled_from(COMPARISONS), st.integers(0, 3), min_size=1),
        "kind": st.sampled_from(["a", ["a", "b"], []]),
        "batch_size": st.integers(0, 2),
        "health": st.just({"s": {"below": 0.5}}),
    },
)
EFFECTS = st.fixed_dictionaries(
    {"num_draft_tokens": st.integers(0, 9)},
    optional={
        "sources": st.lists(st.sampled_from("stu"), max_size=3),
        "forbid": st.lists(st.sampled_from("stu"), max_size=2),
    },
)
RULES = st.lists(
    st.fixed_dictionaries({"when": CONDITIONS, "then": EFFECTS, "last": st.booleans()}), max_size=5
)


def holds(when: dict, facts: dict) -> bool:
    """The same, said as plainly as can be."""
    compare = {
        "above": lambda a, b: a > b,
        "at_least": lambda a, b: a >= b,
        "below": lambda a, b: a < b,
        "at_most": lambda a, b: a <= b,
    }
    for relation, value in when.get("context_len", {}).items():
        if not compare[relation](facts["context_len"], value):
            return False
    kinds = when.get("kind", facts["kind"])
    if facts["kind"] not in ([kinds] if isinstance(kinds, str) else kinds):
        return False
    if when.get("batch_size", facts["batch_size"]) != facts["batch_size"]:
        return False
    return "health" not in when or facts["health"].get("s", 1.0) < 0.5


@settings(deadline=None)
@given(
    rules=RULES,
    facts=st.lists(
        st.fixed_dictionaries(
            {
                "context_len": st.integers(0, 4),
                "kind": st.sampled_from(["a", "b", ""]),
                "batch_size": st.integers(0, 2),
                "health": st.sampled_from([{}, {"s": 0.2}, {"s": 0.7}]),
            }
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_random_rules_do_what_they_say(rules, facts):
    compiled = compile_policy(policy(*rules))
    for each in facts:
        request, load = read_facts(each)
        found = compiled.restrict(request, load)
        assert found == compiled.restrict(request, load) == compiled.explain(request, load).allowed
        applied = []
        for rule in rules:
            if holds(rule["when"], each):
                applied.append(rule["then"])
                if rule["last"]:
                    break
        for name in "stuv":
            assert found.allows(name) == all(
                name in then.get("sources", "stuv") and name not in then.get("forbid", "")
                for then in applied
            )
        assert found.num_draft_tokens == min(
            (then["num_draft_tokens"] for then in applied), default=None
        )


def test_a_hundred_rules_are_asked_in_less_than_15_microseconds():
    rule = {
        "when": {"context_len": {"above": 1 << 20}, "kind": "code", "batch_size": {"above": 0}},
        "then": {"num_draft_tokens": 4},
    }
    often = {"when": {"kind": "code"}, "then": {"num_draft_tokens": 4, "forbid": ["x"]}}
    rules = compile_policy(policy(*[rule] * 80, *[often] * 20))
    request, load = read_facts({"kind": "code", "batch_size": 1})
    seconds = []
    for _ in range(300):
        start = time.perf_counter()
        rules.restrict(request, load)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 15e-6


def test_the_schema_knows_what_the_reader_knows():
    rule = policy_schema()["properties"]["rules"]["items"]["properties"]
    facts = set(rule["when"]["properties"])
    assert facts == {*NUMBERS, *TEXTS, *BOOLEANS, "health"}
    fields = {*RequestFacts.__dataclass_fields__, *LoadFacts.__dataclass_fields__}
    assert facts == fields
    assert set(LOAD_FACTS) == set(LoadFacts.__dataclass_fields__)
    shares = rule["when"]["properties"]["kv_usage"]["anyOf"][0]
    assert shares == {"type": "number", "minimum": 0.0, "maximum": 1.0}
    assert set(rule["then"]["properties"]) == {"sources", "forbid", "num_draft_tokens"}
    assert rule["then"]["properties"]["num_draft_tokens"]["maximum"] == INT32_MAX


def bound(most: int) -> dict:
    return policy({"then": {"num_draft_tokens": most}})


def test_a_policy_is_replaced_between_two_steps_and_called_back():
    live = LivePolicy(bound(1))
    request, first, second = RequestFacts(), LoadFacts(), LoadFacts()
    assert live.restrict(request, first).num_draft_tokens == 1
    assert live.replace(bound(2)).number == 2
    assert live.restrict(request, first).num_draft_tokens == 1  # still the same step
    assert live.restrict(request, second).num_draft_tokens == 2
    with pytest.raises(ConfigError, match=r"\$\.version must be 1, got 9"):
        live.replace({"version": 9, "rules": []})
    assert (live.current.number, live.current.document) == (2, bound(2))
    assert live.back().number == 1
    assert live.restrict(request, LoadFacts()).num_draft_tokens == 1
    with pytest.raises(ConfigError, match="no policy before version 1 to go back to"):
        live.back()
    assert live.replace(bound(3)).number == 3  # numbers are not given twice
    assert live.explain(request, first).allowed.num_draft_tokens == 3


def test_the_last_ten_versions_are_kept():
    live = LivePolicy()
    assert live.restrict(RequestFacts(), LoadFacts()) == Allowed()
    for most in range(20):
        live.replace(bound(most))
    assert [version.number for version in live.versions] == list(range(12, 22))
    for most in reversed(range(11, 20)):
        assert live.current.document == bound(most)
        if most > 11:
            live.back()
    assert len(live.versions) == KEPT - 8
    assert live.versions[-1].since <= time.time()


def test_a_policy_names_only_sources_that_there_are():
    with pytest.raises(ConfigError, match="no source is called 'x'; sources: lookup"):
        LivePolicy(policy({"then": {"forbid": ["x"]}}), ["lookup"])


def test_a_file_that_changes_is_read_again_and_a_bad_one_leaves_things_as_they_are(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(bound(1)))
    live = LivePolicy(load_policy(path))
    file = PolicyFile(path, live)
    assert file.poll() is None
    path.write_text(json.dumps(bound(22)))
    version = file.poll()
    assert version is not None and version.document == bound(22)
    assert file.poll() is None
    path.write_text('{"version": 1, "rules": [{}]}')
    with pytest.raises(ConfigError, match=r"\$\.rules\[0\] lacks the key 'then'"):
        file.poll()
    assert file.poll() is None  # said once
    path.unlink()
    assert file.poll() is None
    assert live.current.document == bound(22)
    with pytest.raises(ConfigError, match=r"cannot read the policy .*policy\.json: No such file"):
        file.reload()


def test_a_hangup_reads_the_file_again(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(bound(1)))
    live = LivePolicy()
    told = []
    before = signal.getsignal(signal.SIGHUP)
    try:
        PolicyFile(path, live).on_hangup(told.append)
        os.kill(os.getpid(), signal.SIGHUP)
        path.write_text("[]")
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert live.current.document == bound(1)
    assert told[0] is live.current
    assert "$ must be an object" in str(told[1])


def run(*arguments: str):
    return CliRunner().invoke(app, ["policy", *arguments])


def test_the_command_line_checks_and_explains(tmp_path):
    path = tmp_path / "policy.json"
    document = policy(
        {"name": "long", "when": {"context_len": {"above": 4096}}, "then": {"forbid": ["dspark"]}},
        {"name": "busy", "when": {"batch_size": {"at_least": 8}}, "then": {"num_draft_tokens": 2}},
    )
    path.write_text(json.dumps(document))
    found = run("check", str(path))
    assert (found.exit_code, found.output) == (0, f"{path}: 2 rules, no fault\n")
    facts = '{"context_len": 5000, "batch_size": 4}'
    assert run("explain", str(path), "--facts", facts).output.splitlines() == [
        "applies  long",
        "does not  busy (batch_size is 4, expected at least 8)",
        "may draft: any source but dspark; as many tokens as pay",
    ]
    assert json.loads(run("explain", str(path), "--facts", facts, "--json").output) == {
        "rules": [
            {"name": "long", "applies": True},
            {
                "name": "busy",
                "applies": False,
                "why_not": "batch_size is 4, expected at least 8",
            },
        ],
        "allowed": {"sources": None, "forbid": ["dspark"], "num_draft_tokens": None},
    }
    assert json.loads(run("schema").output) == policy_schema()
    for arguments, message in (
        (["check", str(path), "--sources", "lookup, table"], "no source is called 'dspark'"),
        (["check", str(tmp_path / "none")], "cannot read the policy"),
        (["explain", str(path), "--facts", "{"], "--facts is no JSON"),
        (["explain", str(path), "--facts", '{"kv_usage": 7}'], r"--facts.kv_usage must be in"),
    ):
        result = run(*arguments)
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


def test_the_rules_of_the_hybrid_of_the_operations_article():
    """Long context and memory left: neural; short and few: lookup; ill source: none of it."""
    document = policy(
        {
            "when": {"context_len": {"above": 4096}, "kv_usage": {"below": 0.7}},
            "then": {"sources": ["dspark"]},
            "last": True,
        },
        {
            "when": {"context_len": {"below": 1024}, "batch_size": {"below": 8}},
            "then": {"sources": ["lookup", "table"]},
            "last": True,
        },
        {"when": {"health": {"remote": {"below": 0.9}}}, "then": {"forbid": ["remote"]}},
    )
    assert allowed(document, context_len=5000, kv_usage=0.5).sources == ("dspark",)
    assert allowed(document, context_len=5000, kv_usage=0.7) == Allowed()
    assert allowed(document, context_len=500, batch_size=7).sources == ("lookup", "table")
    found = allowed(document, context_len=500, batch_size=8, health={"remote": 0.89})
    assert not found.allows("remote") and found.allows("dspark")
