"""Leave out unusable data and count it (data.on_error=skip), or raise its error."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minitrain.errors import InputError


@dataclass
class Skips:
    """Counts unusable data that is skipped; if skipping is not `allowed`, it is an error.

    Text files that cannot be opened are always errors.
    """

    allowed: bool = False
    count: int = 0
    first: str = ""

    def read(self, function: Callable, *arguments) -> Any:
        """Return function(*arguments), or None if that raised InputError and was counted."""
        try:
            return function(*arguments)
        except InputError as error:
            self.refuse(error)

    def refuse(self, error: InputError) -> None:
        if not self.allowed:
            raise error
        self.count += 1
        self.first = self.first or str(error)

    @property
    def note(self) -> str:
        return f"{self.count:,} skipped, the first: {self.first}" if self.count else ""

    @property
    def aside(self) -> str:
        """Return the note in parentheses, for the end of a line."""
        return f" ({self.note})" if self.count else ""
