"""Stop conditions and text: decided by characters, whatever tokens and blocks divide them."""

from itertools import pairwise

import pytest
from fakes import ALPHABET
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.output import OutputBuilder, StopStrings
from outrider.sampling_params import SamplingParams


def ids(text: str) -> list[int]:
    return ALPHABET.encode(text)


def build(blocks: list[list[int]], max_tokens: int = 100, **params) -> tuple[OutputBuilder, list]:
    """The output after the blocks, and the text shown after each."""
    params = SamplingParams(max_tokens=max_tokens, **params)
    output = OutputBuilder(params, max_tokens, (0,), ALPHABET.stream(params.skip_special_tokens))
    shown = []
    for block in blocks:
        if output.finish_reason is None:
            output.sources += ["target"] * output.extend(block)
            shown.append(output.take_text())
    return output, shown


def test_stop_string_early_in_a_block_ends_the_output_there():
    output, shown = build([ids("abc.defghijkl")], stop=["c."])
    assert (output.num_tokens, shown) == (4, ["ab"])
    assert (output.finish_reason, output.stop_reason) == ("stop", "c.")


@pytest.mark.parametrize(
    "blocks",
    [["ab", "cd"], ["abcd"], ["a", "b", "c", "d"], ["abc", "dxyz"]],
)
def test_stop_string_over_tokens_and_blocks_shows_no_part_of_it(blocks):
    output, shown = build([ids(block) for block in blocks], stop="bcd")
    assert "".join(shown) == "a"
    assert output.num_tokens == 4
    assert output.stop_reason == "bcd"


def test_text_held_back_is_shown_once_it_cannot_be_a_stop_string():
    output, shown = build([ids("ab"), ids("c"), ids("x"), ids("bc")], stop=["bcd"])
    assert shown == ["a", "", "bcx", ""]
    output.finish("length")
    assert output.take_text() == "bc"


def test_stop_string_that_begins_inside_a_token():
    end = ALPHABET.pieces.index(b"END")
    output, shown = build([[*ids("a"), end, *ids("xyz")]], stop=["NDx"])
    assert (shown, output.num_tokens) == (["aE"], 3)


def test_stop_string_can_be_kept_in_the_text():
    _, shown = build([ids("ab.cd")], stop=["b."], include_stop_str_in_output=True)
    assert shown == ["ab."]


def test_the_stop_string_that_ends_first_wins_whatever_their_order():
    for stop in (["bcde", "cd"], ["cd", "bcde"]):
        output, shown = build([ids("abcdef")], stop=stop)
        assert (output.stop_reason, shown) == ("cd", ["ab"])


def test_end_of_sequence_is_kept_in_ids_and_not_in_text():
    output, shown = build([[*ids("ab"), 0, *ids("cd")]])
    assert (output.num_tokens, shown) == (3, ["ab"])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_stop_id_ends_and_is_named():
    output, shown = build([ids("abcd")], stop_token_ids=[ids("c")[0]])
    assert (output.num_tokens, shown, output.stop_reason) == (3, ["ab"], ids("c")[0])


def test_ignored_end_of_sequence_goes_on():
    output, _ = build([[0, 0, *ids("a")]], max_tokens=3, ignore_eos=True)
    assert (output.num_tokens, output.finish_reason) == (3, "length")


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(2, 3), (3, 7), (4, 7)])
def test_nothing_ends_within_min_tokens(min_tokens, num_tokens):
    block = [*ids("ab"), 0, *ids("cde"), 0]
    output, _ = build([block], min_tokens=min_tokens)
    assert (output.num_tokens, output.finish_reason) == (num_tokens, "stop")


def test_stop_string_within_min_tokens_does_not_count():
    output, shown = build([ids("a.b.c")], stop=["."], min_tokens=2)
    assert (shown, output.num_tokens) == (["a.b"], 4)


def test_stop_string_at_the_last_token_allowed_is_a_stop():
    output, _ = build([ids("ab.")], max_tokens=3, stop=["."])
    assert (output.finish_reason, output.stop_reason) == ("stop", ".")


def test_characters_over_tokens_and_blocks_come_whole():
    tokens = [i for c in "€🙂é" for i in ALPHABET.encode(c)]
    assert len(tokens) == 5
    output, shown = build([[t] for t in tokens])
    assert shown == ["", "€", "", "🙂", "é"]
    assert output.finish_reason is None


def test_a_character_cut_in_two_by_the_length_is_left_out():
    output, shown = build([ids("a€")], max_tokens=2)
    assert (shown, output.finish_reason) == (["a"], "length")


def test_stop_string_of_a_character_over_two_tokens():
    output, shown = build([ids("ab€cd")], stop=["€"])
    assert (shown, output.num_tokens) == (["ab"], 4)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_chunking_never_matters(text, stops, cuts, include):
    """Against the definition: the first place in the text at which some stop string ends."""
    ends = [
        (end, -len(stop), stop)
        for end in range(len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    expected, met = text, None
    if ends:
        end, _, met = min(ends)
        expected = text[: end if include else end - len(met)]
    finder, found, shown = StopStrings(stops, include), None, ""
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    for start, end in pairwise(edges):
        piece, found = finder.push(text[start:end])
        shown += piece
        assert expected.startswith(shown)
        if found:
            break
    assert shown + ("" if found else finder.flush()) == expected
    assert found == met
