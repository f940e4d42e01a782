"""The one exception for a user's mistake, and how messages show any other."""

MOST_CHARACTERS = 200


class InputError(ValueError):
    """Bad input: one clear sentence that names the file or value and what would be right. The CLI exits with code 2."""


def one_line(error: BaseException) -> str:
    """The whole message of an error, with its line breaks and runs of blanks as single blanks."""
    return " ".join(str(error).split())


def named(error: BaseException) -> str:
    """The class of an error and the first line of its message, at most 200 characters in all: what a row of a table has room for."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(lines[0].split())}"[:MOST_CHARACTERS]
