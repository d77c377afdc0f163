"""Write sampled responses as lines of JSON, and read them."""

import itertools
import json
from operator import attrgetter
from pathlib import Path

from torch.distributed import ProcessGroup

from minitrain.errors import InputError
from minitrain.grpo.responses import Group, Response
from minitrain.parallel.agreement import gather_to_first
from minitrain.run.checkpoint.durable import write_durably


def write_rollouts(file: Path, groups: list[Group], ranks: ProcessGroup) -> None:
    """Write one line per response, with all digits of its numbers.

    All `ranks` have these groups and call this. Each converts a share to text, which takes seconds for
    the millions of numbers of a step; the first one writes the file.
    """
    responses = list(itertools.chain(*groups))
    first, end = (
        len(responses) * rank // ranks.size() for rank in (ranks.rank(), ranks.rank() + 1)
    )
    text = "".join(json.dumps(vars(response)) + "\n" for response in responses[first:end])
    texts = gather_to_first(text, ranks)
    if texts is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(file, "".join(texts))


def remove_rollouts(folder: Path, before: int) -> None:
    """Remove the responses of steps before number `before`, counted from 1."""
    for file in folder.glob("step-*.jsonl"):
        number = file.stem.removeprefix("step-")
        if number.isdecimal() and int(number) < before:
            file.unlink(missing_ok=True)


def read_rollouts(file: Path) -> list[Group]:
    """Return the groups that `write_rollouts` wrote. Raises InputError for other files."""
    try:
        rollouts = [
            Response(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()
        ]
        if not rollouts:
            raise ValueError("it is empty")
        if not all(isinstance(x.prompt, list) and isinstance(x.response, list) for x in rollouts):
            raise ValueError("a prompt or a response is not a list of tokens")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{file} does not hold the responses that the next step is to train on: {error}"
        ) from error
    return [list(group) for _, group in itertools.groupby(rollouts, attrgetter("group"))]
