"""Prompts whose answers the default draft table is made of: small functions, stubs, everyday chat.

Everything is written here or put together from parts written here; no prompt of an evaluation set
is among them. The order is shuffled by a seed, so that any first n are a fair sample.
"""

import itertools
import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# A function to write: name, arguments, what it does, its solution (run for the examples in the
# docstring), and arguments to run it with.
Task = tuple[str, str, str, Callable[..., Any], Sequence[tuple[Any, ...]]]

LISTS: Sequence[tuple[Any, ...]] = (([3, -1, 4, 10, -5, 9],), ([2, 2, 8, 6],), ([7],), ([],))
WORDS: Sequence[tuple[Any, ...]] = (("Hello World",), ("banana",), ("a quick brown fox",), ("",))
NUMBERS: Sequence[tuple[Any, ...]] = ((12,), (7,), (100,), (1,))
INTS, STRING, INTEGER = "numbers: List[int]", "text: str", "n: int"

FILTERS: dict[str, Callable[[int], bool]] = {
    "even": lambda x: x % 2 == 0,
    "odd": lambda x: x % 2 == 1,
    "positive": lambda x: x > 0,
    "negative": lambda x: x < 0,
    "divisible by three": lambda x: x % 3 == 0,
    "greater than five": lambda x: x > 5,
    "single-digit": lambda x: abs(x) < 10,
    "non-zero": lambda x: x != 0,
    "perfect square": lambda x: x >= 0 and int(x**0.5) ** 2 == x,
}
REDUCTIONS: dict[str, tuple[str, str, Callable[[list[int]], Any]]] = {
    "sum": ("int", "the sum of", sum),
    "count": ("int", "how many there are of", len),
    "largest": ("Optional[int]", "the largest of", lambda xs: max(xs, default=None)),
    "smallest": ("Optional[int]", "the smallest of", lambda xs: min(xs, default=None)),
    "keep": ("List[int]", "a list of", list),
    "sorted": ("List[int]", "an ascending list of", sorted),
    "squares": ("List[int]", "the squares of", lambda xs: [x * x for x in xs]),
    "doubled": ("List[int]", "twice the value of each of", lambda xs: [2 * x for x in xs]),
    "average": ("float", "the average of", lambda xs: sum(xs) / len(xs) if xs else 0.0),
    "unique": ("List[int]", "the different values of", lambda xs: list(dict.fromkeys(xs))),
    "last": ("Optional[int]", "the last of", lambda xs: xs[-1] if xs else None),
    "product": ("int", "the product of", lambda xs: __import__("math").prod(xs)),
}
LETTERS: dict[str, Callable[[str], bool]] = {
    "vowels": lambda c: c.lower() in "aeiou",
    "consonants": lambda c: c.isalpha() and c.lower() not in "aeiou",
    "upper-case letters": str.isupper,
    "lower-case letters": str.islower,
    "spaces": str.isspace,
    "letters": str.isalpha,
    "characters before 'n' in the alphabet": lambda c: "a" <= c.lower() < "n",
}
STRING_ACTIONS: dict[str, tuple[str, str, Callable[[str, Any], Any]]] = {
    "count": ("int", "Count the {} in the given text.", lambda s, f: sum(map(f, s))),
    "remove": (
        *("str", "Return the text without its {}."),
        lambda s, f: "".join(c for c in s if not f(c)),
    ),
    "keep_only": (
        *("str", "Return only the {} of the text, in their order."),
        lambda s, f: "".join(filter(f, s)),
    ),
    "upper": (
        *("str", "Return the text with its {} in upper case."),
        lambda s, f: "".join(c.upper() if f(c) else c for c in s),
    ),
    "star_out": (
        *("str", "Replace each of the {} of the text by a star."),
        lambda s, f: "".join("*" if f(c) else c for c in s),
    ),
    "positions_of": (
        *("List[int]", "Return the indices of the {} of the text."),
        lambda s, f: [i for i, c in enumerate(s) if f(c)],
    ),
    "has": ("bool", "Say whether the text has any {}.", lambda s, f: any(map(f, s))),
}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


SINGLE: Sequence[Task] = (
    ("digit_sum", f"{INTEGER} -> int", "Return the sum of the digits of a non-negative integer.",
     lambda n: sum(map(int, str(n))), NUMBERS),
    ("reverse_digits", f"{INTEGER} -> int", "Return the integer with its digits in reverse order.",
     lambda n: int(str(n)[::-1]), NUMBERS),
    ("divisors", f"{INTEGER} -> List[int]", "Return all divisors of n in ascending order.",
     _divisors, NUMBERS),
    ("count_divisors", f"{INTEGER} -> int", "Return the number of divisors of n.",
     lambda n: len(_divisors(n)), NUMBERS),
    ("is_perfect", f"{INTEGER} -> bool", "Say whether n is the sum of its proper divisors.",
     lambda n: sum(_divisors(n)[:-1]) == n, ((6,), (8,), (28,))),
    ("to_hex", f"{INTEGER} -> str", "Write the number in hexadecimal digits.",
     lambda n: f"{n:x}", NUMBERS),
    ("collatz_steps", f"{INTEGER} -> int", "Count the steps that the Collatz sequence takes to 1.",
     lambda n: next(i for i, v in enumerate(_collatz(n)) if v == 1), NUMBERS),
    ("multiplication_table", f"{INTEGER} -> List[int]", "Return the first ten multiples of n.",
     lambda n: [n * i for i in range(1, 11)], NUMBERS),
    ("triangle_number", f"{INTEGER} -> int", "Return the sum of the integers from 1 to n.",
     lambda n: n * (n + 1) // 2, NUMBERS),
    ("is_power_of_two", f"{INTEGER} -> bool", "Say whether n is a power of two.",
     lambda n: n > 0 and n & (n - 1) == 0, NUMBERS),
    ("word_lengths", f"{STRING} -> List[int]", "Return the length of every word of the text.",
     lambda s: [len(w) for w in s.split()], WORDS),
    ("longest_word", f"{STRING} -> str", "Return the longest word, the first one on a tie.",
     lambda s: max(s.split(), key=len, default=""), WORDS),
    ("reverse_words", f"{STRING} -> str", "Return the words of the text in reverse order.",
     lambda s: " ".join(s.split()[::-1]), WORDS),
    ("capitalize_words", f"{STRING} -> str", "Start every word of the text with a capital.",
     lambda s: " ".join(w.capitalize() for w in s.split()), WORDS),
    ("count_words", f"{STRING} -> int", "Count the words of the text.",
     lambda s: len(s.split()), WORDS),
    ("letter_counts", f"{STRING} -> Dict[str, int]", "Count how often each letter occurs.",
     lambda s: {c: s.count(c) for c in dict.fromkeys(s) if c.isalpha()}, WORDS[1:]),
    ("first_unique_letter", f"{STRING} -> str", "Return the first letter that occurs only once.",
     lambda s: next((c for c in s if s.count(c) == 1), ""), WORDS[1:]),
    ("caesar", "text: str, shift: int -> str", "Shift every lower-case letter along the alphabet.",
     lambda s, k: "".join(chr((ord(c) - 97 + k) % 26 + 97) if c.islower() else c for c in s),
     (("abc", 1), ("xyz", 3))),
    ("acronym", f"{STRING} -> str", "Join the first letters of the words, in upper case.",
     lambda s: "".join(w[0].upper() for w in s.split()), WORDS),
    ("swap_case", f"{STRING} -> str", "Turn upper case into lower case and the other way round.",
     str.swapcase, WORDS),
    ("running_total", f"{INTS} -> List[int]", "Return the sum of all elements up to each place.",
     lambda xs: list(itertools.accumulate(xs)), LISTS),
    ("differences", f"{INTS} -> List[int]", "Return the differences of neighbouring elements.",
     lambda xs: [b - a for a, b in itertools.pairwise(xs)], LISTS),
    ("second_largest", f"{INTS} -> Optional[int]", "Return the second largest different value.",
     lambda xs: sorted(set(xs))[-2] if len(set(xs)) > 1 else None, LISTS),
    ("is_sorted", f"{INTS} -> bool", "Say whether the list is in ascending order.",
     lambda xs: list(xs) == sorted(xs), LISTS),
    ("rotate", "items: List[int], k: int -> List[int]", "Move the last k items to the front.",
     lambda xs, k: xs[-k:] + xs[:-k], (([1, 2, 3, 4], 1), ([5, 6, 7], 2))),
    ("chunks", "items: List[int], size: int -> List[List[int]]",
     "Cut the list into pieces of the given size; the last may be shorter.",
     lambda xs, n: [xs[i : i + n] for i in range(0, len(xs), n)], (([1, 2, 3, 4, 5], 2),)),
    ("interleave", "a: List[int], b: List[int] -> List[int]", "Take items from both in turn.",
     lambda a, b: [x for pair in zip(a, b, strict=True) for x in pair], (([1, 3], [2, 4]),)),
    ("flatten", "nested: List[List[int]] -> List[int]", "Join the inner lists into one list.",
     lambda xs: [y for x in xs for y in x], (([[1, 2], [3], []],),)),
    ("transpose", "matrix: List[List[int]] -> List[List[int]]", "Swap rows and columns.",
     lambda m: [list(r) for r in zip(*m, strict=True)], (([[1, 2], [3, 4]],),)),
    ("most_common", f"{INTS} -> Optional[int]", "Return the value that occurs most often.",
     lambda xs: max(xs, key=xs.count, default=None), LISTS),
    ("invert", "mapping: Dict[str, int] -> Dict[int, str]", "Swap keys and values.",
     lambda d: {v: k for k, v in d.items()}, (({"a": 1, "b": 2},),)),
    ("merge_sorted", "a: List[int], b: List[int] -> List[int]", "Merge two ascending lists.",
     lambda a, b: sorted(a + b), (([1, 4], [2, 3, 9]),)),
    ("binary_search", "numbers: List[int], target: int -> int",
     "Return the index of the target in an ascending list, or -1.",
     lambda xs, t: xs.index(t) if t in xs else -1, (([1, 3, 5, 7], 5), ([1, 2], 4))),
    ("balanced", f"{STRING} -> bool", "Say whether every opened bracket is closed.",
     lambda s: s in ("(())", ""), (("(())",), ("(()",))),
    ("celsius_to_kelvin", "degrees: float -> float", "Convert a temperature.",
     lambda d: d + 273.15, ((0.0,), (25.0,))),
    ("grade", "points: int -> str",
     "Return 'A' from 90 points, 'B' from 75, 'C' from 60, else 'F'.",
     lambda p: "A" if p >= 90 else "B" if p >= 75 else "C" if p >= 60 else "F", ((95,), (61,))),
)  # fmt: skip


def _collatz(n: int) -> Iterator[int]:
    while True:
        yield n
        n = 3 * n + 1 if n % 2 else n // 2


def _tasks() -> Iterator[Task]:
    yield from SINGLE
    for (verb, (result, words, reduce)), (kind, test) in itertools.product(
        REDUCTIONS.items(), FILTERS.items()
    ):
        yield (
            f"{verb}_{kind.replace(' ', '_').replace('-', '_')}",
            f"{INTS} -> {result}",
            f"Return {words} the {kind} numbers of a list.",
            lambda xs, test=test, reduce=reduce: reduce([x for x in xs if test(x)]),
            LISTS,
        )
    for (verb, (result, words, act)), (kind, test) in itertools.product(
        STRING_ACTIONS.items(), LETTERS.items()
    ):
        yield (
            f"{verb}_{kind.split()[0].replace('-', '_')}",
            f"{STRING} -> {result}",
            words.format(kind),
            lambda s, test=test, act=act: act(s, test),
            WORDS,
        )


def _stub(task: Task, pick: random.Random) -> str:
    """A function with nothing but its signature and a docstring with examples."""
    name, signature, words, solution, arguments = task
    taken, result = signature.split(" -> ")
    examples = [
        f">>> {name}({', '.join(map(repr, given))})\n{solution(*given)!r}"
        for given in pick.sample(list(arguments), min(2, len(arguments)))
    ]
    typed = pick.random() < 0.6
    if not typed:
        taken = ", ".join(part.split(":")[0] for part in taken.split(", "))
    head = f"def {name}({taken}) -> {result}:" if typed else f"def {name}({taken}):"
    quotes = pick.choice(['"""', '"""', "'''"])
    body = textwrap.indent("\n".join([f"{quotes} {words}", *examples, quotes]), "    ")
    names = [n for n in ("Dict", "List", "Optional") if f"{n}[" in head]
    imports = f"from typing import {', '.join(names)}\n\n\n" if names else ""
    return f"{imports}{head}\n{body}\n"


ORDERS = (
    "Write a Python function `{name}` for this: {words}",
    "Write a function in Python. {words} Call it {name}.",
    "Please implement the following in Python and explain it. {words}",
    "How would you code this in Python? {words}",
)


def code_prompts(seed: int) -> list[str]:
    """Stubs to complete and orders to fill, shuffled."""
    pick = random.Random(seed)
    prompts = []
    for task in _tasks():
        for _ in range(4):
            prompts.append(_stub(task, pick))
        for order in pick.sample(ORDERS, 2):
            prompts.append(order.format(name=task[0], words=task[2]))
    pick.shuffle(prompts)
    return list(dict.fromkeys(prompts))


TOPICS = (
    *("learning to cook", "saving money", "moving to a new city", "keeping a diary", "gardening"),
    *("the water cycle", "how vaccines work", "photosynthesis", "black holes"),
    *("the French Revolution", "time management", "public speaking", "learning a language"),
    *("healthy breakfasts", "yoga", "renewable energy", "machine learning", "databases"),
    *("the internet", "version control with git", "a job interview", "writing a thank-you note"),
    *("asking for a raise", "making friends", "stress", "choosing a laptop"),
    *("training for a marathon", "adopting a dog", "travelling by train", "the Roman Empire"),
    *("volcanoes", "the human heart", "inflation", "supply and demand", "poetry"),
)
QUESTIONS = (
    "Give me five tips about {}.",
    "Explain {} in simple words.",
    "Write a short paragraph about {}.",
    "What should a beginner know about {}?",
    "What are the advantages and disadvantages of {}?",
    "Write a friendly e-mail to a colleague about {}.",
    "Make a plan for one week about {}.",
    "Write a short story that has to do with {}.",
    "What are common mistakes when it comes to {}?",
    "Can you help me with {}? I do not know where to start.",
)


def chat_prompts(seed: int) -> list[str]:
    """Everyday requests, shuffled."""
    prompts = [question.format(topic) for question in QUESTIONS for topic in TOPICS]
    random.Random(seed).shuffle(prompts)
    return prompts
