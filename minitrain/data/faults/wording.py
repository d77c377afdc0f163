"""Name what decides how data is read as the user wrote it: settings of `train`, or options."""

from typing import NamedTuple


class Wording(NamedTuple):
    """The words of errors about data that depend on who reads it; by default the settings' names."""

    # the setting that holds paths; "" if they are words of the command line
    path: str = "data.path"
    # what stands before a kind of data, and before the key of a text
    kind: str = "data.kind="
    field: str = "data.field"
    # the setting that leaves files out; "" if there is none
    exclude: str = "data.exclude"
    # where lines of text belong that are not JSON
    lines: str = "data.kind=text reads texts"
    # where objects without a text belong
    chats: str = "chats need task=sft or lora, pairs task=dpo"
    # what takes a document, a chat or a pair where another of them is expected
    document: str = ", for task=pretrain"
    chat: str = ", for task=sft"
    pair: str = ", for task=dpo"
    # how the key of a prompt or an answer is named
    key: str = "; or name its key by grpo.{}_key"

    @property
    def place(self) -> str:
        """Return what stands before a line about a path."""
        return f"{self.path}: " if self.path else ""

    @property
    def give(self) -> str:
        """Return what stands before a path that is to be given instead."""
        return f"{self.path}=" if self.path else "give "


SETTINGS = Wording()
# of a command with options, which replaces what does not hold for it
OPTIONS = Wording(
    path="", kind="--kind ", field="--field", exclude="", lines="--kind text reads texts", key=""
)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as 1 row or 1,200 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
