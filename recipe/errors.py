"""The one exception a user is meant to read."""


class RecipeError(Exception):
    """Bad input or a failed check, told in one message.

    The message names the file, the field, the value found and the cure.
    ``python -m recipe`` prints it as ``error: …`` and exits with status 1.
    """
