"""The one exception that means "the input is wrong, not the program"."""


class InputError(Exception):
    """A mistake in a config, a file or a checkpoint, told in one line: what was wrong, where, and what would be right.

    The command lines print the message and end with exit code 2; `--debug` shows the traceback too.
    """
