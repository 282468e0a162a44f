"""Beginnings of prompts, for a target that writes its own.

A chat model that continues the header of a user's turn writes what users wrote in its training
data. Left alone it mostly chats; a few words decide for a kind of task.
"""

Beginning = tuple[str, str, float]  # category, text, weight

_CHAT = (
    *("Write ", "Explain ", "What ", "How ", "Summarize the following text:\n", "Translate "),
    *("Can you ", "Draft ", "Compose ", "Imagine you are ", "Describe ", "Rewrite ", "Who "),
    *("Why ", "Create ", "Give me ", "Suppose ", "Which ", "Is it ", "Help me ", "Tell me "),
    "Compare ",
)
_CODE = {
    "Write a Python function that": 4.0,
    "Complete this Python function:\n```python\ndef ": 4.0,
    "Implement this function in Python:\n```python\nfrom typing import List\n\n\ndef ": 4.0,
    "Finish this function so that its docstring is true:\n```python\ndef ": 4.0,
    "Here is a Python function with its docstring. Write the body.\n\n```python\ndef ": 4.0,
    "Complete the function below so that its doctests pass:\n```python\ndef ": 4.0,
    "Write code that solves this problem and passes its tests:\n```python\n": 4.0,
    "Solve this programming task:\n```python\n\ndef ": 4.0,
    "Write a Python function `": 2.0,
    "Fix the bug in this code:\n```python\n": 2.0,
    "Write a function": 2.0,
    "Given a list of integers,": 2.0,
    "Given a string,": 1.0,
    "Write a program": 1.0,
    "Write a Python class": 1.0,
    "Explain this code:\n```python\n": 1.0,
    "Write unit tests for this function:\n```python\ndef ": 1.0,
    "Write a SQL query": 0.5,
    "Write a JavaScript function": 0.5,
}


def default_beginnings() -> list[Beginning]:
    """Chat, a fifth of it begun by nothing, and code, in about equal parts."""
    chat = [("chat", "", len(_CHAT) / 4), *(("chat", text, 1.0) for text in _CHAT)]
    share = sum(weight for _, _, weight in chat) / sum(_CODE.values())
    return [*chat, *(("code", text, share * weight) for text, weight in _CODE.items())]
