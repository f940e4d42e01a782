"""The one exception for a user's mistake."""


class InputError(ValueError):
    """Bad input: one clear sentence that names the file or value and what would be right. The CLI exits with code 2."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
