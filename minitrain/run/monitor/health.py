"""Report skipped steps and spikes of the loss, with the batch that caused them.

The device decides whether to skip a step (`update_weights`). The host reads the loss and the norm for
the log anyway, perhaps after it has launched the next step, and reaches the same decision from them.
A loss is a spike if it is above

    median + metrics.spike x 1.4826 x median(|loss - median|)

of the last WINDOW losses (at least LEAST_LOSSES), and at least 1 % above the median. Spikes hardly
change medians, unlike mean and standard deviation. The factor 1.4826 makes the second median equal
the standard deviation if losses are normally distributed.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

from minitrain.errors import InputError
from minitrain.settings import Config
from minitrain.training.packing import Dataset

WINDOW = 100
LEAST_LOSSES = 20
# rows of a batch whose origin is reported
SHOWN = 4


class Health:
    """Watch a run's steps: call `check` for each, and `stop_if_stuck` after it is logged.

    say(text): prints a line. batch(step): returns where the batch of step 1, 2, ... comes from.
    updates: number per step. past, skipped: the losses of a resumed run, and how many of its last
    steps changed nothing. Raises InputError if these are too many.
    """

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None],
        batch: Callable[[int], str],
        updates: int = 1,
        past: Iterable[float] = (),
        skipped: int = 0,
    ):
        self.most = config.optim.max_skipped
        self.factor = config.metrics.spike
        self.say = say
        self.batch = batch
        self.updates = updates
        # a skipped step's may be NaN
        self.losses = deque(filter(math.isfinite, past), maxlen=WINDOW)
        self.in_a_row = skipped
        if self.in_a_row >= self.most:
            raise InputError(
                f"the last {self.in_a_row} steps were skipped, which optim.max_skipped={self.most} does not allow: the "
                f"weights are as before them (to go on: a higher optim.max_skipped)"
            )

    def check(self, numbers: dict) -> dict:
        """Report a skipped step or a spike and return {"batch": ...} for it; otherwise {}."""
        self.in_a_row = self.in_a_row + 1 if numbers["skipped"] == self.updates else 0
        limit = self.limit()
        loss = numbers["loss"]
        step = numbers["step"]
        problem = ""
        if numbers["skipped"]:
            problem = f"skipped, as {not_finite(numbers)}"
        elif loss > limit:
            problem = f"loss={loss:.4g} is a spike, above {limit:.4g}"
        if math.isfinite(loss):
            self.losses.append(loss)
        if not problem:
            return {}
        origin = self.batch(step)
        self.say(f"step {step}: {problem}; {origin}")
        return {"batch": origin}

    def stop_if_stuck(self, numbers: dict) -> None:
        """Raise InputError if optim.max_skipped steps in a row were skipped."""
        if self.in_a_row >= self.most:
            step = numbers["step"]
            raise InputError(
                f"step {step} is number {self.in_a_row} in a row to be skipped (optim.max_skipped), as "
                f"{not_finite(numbers)}: the weights are as after step {step - self.in_a_row}, and checkpoints "
                f"intact; the batch was {numbers['batch']}"
            )

    def limit(self) -> float:
        """Return the loss above which a loss is a spike; infinity while there are too few losses."""
        if not self.factor or len(self.losses) < LEAST_LOSSES:
            return math.inf
        middle = median(self.losses)
        deviation = 1.4826 * median(abs(loss - middle) for loss in self.losses)
        return middle + max(self.factor * deviation, 0.01 * abs(middle))


def not_finite(numbers: dict) -> str:
    """Return why a step was skipped."""
    return f"loss={numbers['loss']} or grad_norm={numbers['grad_norm']} is not finite"


def batch_origin(dataset: Dataset, rows: int, step: int) -> str:
    """Return a line on the `rows` of the dataset that step 1, 2, ... used.

    It says where the first of them come from if the dataset has `origin`.
    """
    first = (step - 1) * rows
    text = f"rows {first} to {first + rows - 1} of the data"
    if (origin := getattr(dataset, "origin", None)) is None:
        return text
    # without repeats, because one document may fill several rows
    shown = dict.fromkeys(origin(n) for n in range(first, first + min(rows, SHOWN)))
    return f"{text}: {', '.join(shown)}{', ...' if rows > SHOWN else ''}"
