"""What counts as text: Python strings can hold halves of characters, UTF-8 cannot."""

from outrider.errors import PromptError


def check_unicode(text: str, what: str) -> None:
    """Refuse text with lone surrogates, which is how bytes that are not UTF-8 arrive.

    Raises:
        PromptError: names the place and what stands there.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise PromptError(
            f"{what} is not valid Unicode text: {text[at]!r} at character {at} is no character; "
            "expected UTF-8"
        ) from error
