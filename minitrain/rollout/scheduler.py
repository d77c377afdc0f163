"""What the sampler does next: which prompts are computed, which samples are decoded, and with which
pages.

    queue      prefills in order of arrival. A prefill is a sequence of tokens to be computed once, and the samples that
               go on from it: the n of one prompt, or one that was interrupted, with what it had
               produced
    resident   prefills that have pages; they are computed in chunks, all but their last token
    running    samples, each in a row of the decoding batch; the first token they decode is their prefill's last

A sample joins from its prefill: it shares the full pages and gets a copy of the last, partly filled
one, which it will write to; the prefill's last sample takes over everything. When pages run out,
prefills that only wait give theirs back, then the youngest sample: it goes back to the queue as a
prefill of its own and is computed again. Everything is first come, first served, so the oldest
always gets on, and a request that fits the pool alone is always finished.

No tensors and no clock: the same calls give the same schedule, so that tensor-parallel ranks need
not talk about it.
"""

from dataclasses import dataclass, field
from itertools import count

from minitrain.errors import InputError
from minitrain.rollout.pages import Pages
from minitrain.rollout.sampling import SamplingParams


@dataclass(eq=False)
class Sample:
    """One continuation of a prompt. `pages` hold the first `cached` of its tokens; `slot` the state
    of its layers.
    """

    prompt: list[int]
    params: SamplingParams
    key: int  # of its random numbers
    limit: int  # tokens, with the prompt
    arrival: int = 0
    produced: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    slot: int | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.produced


@dataclass(eq=False)
class Prefill:
    """`tokens`, of which all but the last are to be computed, for the `samples` that wait for
    it.
    """

    tokens: list[int]
    samples: list[Sample]
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    slot: int | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Work:
    """What to do next, in this order: copies, then chunks or decoding steps.

    page_copies, slot_copies: (from, to). chunks: (prefill, how many tokens after its `cached`).
    samples: the rows of `steps` decoding steps, each with pages for all of them.
    """

    page_copies: list[tuple[int, int]] = field(default_factory=list)
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[tuple[Prefill, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    steps: int = 0


class Scheduler:
    """rows: how many samples are decoded at once. chunk: prompt tokens computed at once. steps:
    decoded in a row at most, and no more than some sample has left.

    reuse: do new prompts look for pages of earlier ones? Not where layers have states besides
    pages.
    """

    def __init__(self, pages: Pages, rows: int, chunk: int, steps: int, reuse: bool = True):
        self.pages = pages
        self.rows = rows
        self.chunk = chunk
        self.steps = steps
        self.reuse = reuse
        self.queue: list[Prefill] = []
        self.resident: list[Prefill] = []
        self.running: list[Sample] = []
        # a prefill that waits for a free row has one too
        self.slots = list(range(rows + 1))[::-1]
        self.arrivals = count()
        self.chunks_last = False
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.running)

    def submit(self, samples: list[Sample]) -> None:
        """Queue the samples of one prompt. Raises InputError for what could never be finished."""
        first = samples[0]
        needed = self.pages.needed(first.limit - 1)
        if needed > self.pages.count:
            raise InputError(
                f"a request of {len(first.prompt)} prompt tokens and {first.limit - len(first.prompt)} new ones needs "
                f"{needed} pages of {self.pages.size} tokens, and the pool has {self.pages.count} "
                f"(use fewer tokens, or rollout.pages={needed})"
            )
        for sample in samples:
            sample.arrival = next(self.arrivals)
        self.queue.append(Prefill(first.prompt, list(samples)))

    def plan(self) -> Work:
        """The next work. Chunks and decoding take turns, so that long prompts do not hold up those
        who decode.
        """
        self._start_prefills()
        work = Work()
        if not (self.running and self.chunks_last):
            work.chunks = self._chunks()
        self.chunks_last = bool(work.chunks)
        if not work.chunks:
            self._admit(work)
            work.samples = self._grow()
            left = max((sample.limit - 1 - sample.cached for sample in work.samples), default=0)
            work.steps = min(self.steps, left)
        return work

    def computed(self, prefill: Prefill, tokens: int) -> None:
        """So many more tokens of `prefill` are in its pages."""
        prefill.cached += tokens
        if self.reuse:
            self.pages.publish(prefill.tokens[: prefill.cached], prefill.pages)

    def decoded(
        self, sample: Sample, tokens: list[int], logprobs: list[float], finish_reason: str | None
    ) -> None:
        """`sample` produced these."""
        sample.produced += tokens
        sample.logprobs += logprobs
        sample.cached += len(tokens)
        if finish_reason:
            self._finish(sample, finish_reason)

    def cancel(self, sample: Sample) -> None:
        """End a sample wherever it is; what it has produced stays."""
        if sample in self.running:
            self._finish(sample, "cancelled")
        for prefill in self.queue:
            if sample in prefill.samples:
                prefill.samples.remove(sample)
                sample.finish_reason = "cancelled"
                if not prefill.samples:
                    self._drop(prefill)
                    self.queue.remove(prefill)
                return

    def restart(self) -> None:
        """What is under way is to be computed again, from its tokens."""
        while self.resident or self.running:
            self._make_room()

    # --------------------------------------------------------------------------------------------------------- prefills

    def _start_prefills(self) -> None:
        """Give pages to waiting prefills, as long as there are rows for their samples."""
        for prefill in self.queue[len(self.resident) :]:
            awaited = len(self.running) + sum(len(other.samples) for other in self.resident)
            if awaited >= self.rows or not self._start(prefill):
                return

    def _start(self, prefill: Prefill) -> bool:
        """Leave a page to each sample that will need one: to be put back right after starting would
        be a waste.

        What another one is about to compute is waited for: prompts that begin alike often come
        together.
        """
        found = self.pages.match(prefill.tokens[: prefill.length]) if self.reuse else []
        if self.reuse and self._is_coming(prefill.tokens[: prefill.length], len(found) + 1):
            self.pages.release(found)
            return False
        missing = self.pages.needed(prefill.length) - len(found)
        growing = sum(
            self.pages.needed(sample.limit - 1) > len(sample.pages) for sample in self.running
        )
        spare = growing + 1 if self.running or self.resident else 0
        taken = self.pages.take(missing) if missing + spare <= self.pages.available else None
        if taken is None:
            self.pages.release(found)
            return False
        prefill.pages = found + taken
        prefill.cached = len(found) * self.pages.size
        prefill.slot = self.slots.pop()
        self.resident.append(prefill)
        return True

    def _is_coming(self, tokens: list[int], pages: int) -> bool:
        """Will a prefill that has begun soon hold so many full pages with what `tokens` begins
        with?
        """
        count = pages * self.pages.size
        alike = (
            p.tokens[:count] == tokens[:count]
            for p in self.resident
            if p.cached < count <= p.length
        )
        return count <= len(tokens) and any(alike)

    def _drop(self, prefill: Prefill) -> None:
        """A prefill gives back what it has, and would be computed again."""
        if prefill in self.resident:
            self.resident.remove(prefill)
            self.pages.release(prefill.pages)
            self.slots.append(prefill.slot)
            prefill.pages = []
            prefill.cached = 0
            prefill.slot = None

    def _chunks(self) -> list[tuple[Prefill, int]]:
        left = self.chunk
        chunks = []
        for prefill in self.resident:
            missing = prefill.length - prefill.cached
            tokens = min(left, missing)
            # only the first is cut: pieces cost a mask, and tiny ones gain nothing
            if chunks and tokens < missing:
                break
            if tokens > 0:
                chunks.append((prefill, tokens))
                left -= tokens
        return chunks

    # -------------------------------------------------------------------------------------------------------- samples

    def _admit(self, work: Work) -> None:
        """Let samples of computed prefills join the batch, in order."""
        while (
            self.resident
            and len(self.running) < self.rows
            and self.resident[0].cached == self.resident[0].length
        ):
            prefill = self.resident[0]
            sample = prefill.samples.pop(0)
            if not prefill.samples or not self._fork(prefill, sample, work):
                self._inherit(prefill, sample)
            sample.cached = prefill.length
            self.running.append(sample)

    def _fork(self, prefill: Prefill, sample: Sample, work: Work) -> bool:
        """Share the full pages, copy the last one. False if there is no page for that."""
        full, partly = divmod(prefill.length, self.pages.size)
        while (tail := self.pages.take(bool(partly))) is None:
            if self.resident[-1] is prefill:
                return False
            self._drop(self.resident[-1])
        self.pages.share(prefill.pages[:full])
        sample.pages = prefill.pages[:full] + tail
        sample.slot = self.slots.pop()
        work.page_copies += [(prefill.pages[full], page) for page in tail]
        work.slot_copies.append((prefill.slot, sample.slot))
        return True

    def _inherit(self, prefill: Prefill, sample: Sample) -> None:
        """The prefill's last sample takes over; if there are others after all, they have to start
        again.
        """
        sample.pages = prefill.pages
        sample.slot = prefill.slot
        prefill.pages = []
        prefill.cached = 0
        prefill.slot = None
        self.resident.remove(prefill)
        if not prefill.samples:
            self.queue.remove(prefill)

    def _grow(self) -> list[Sample]:
        """Pages for the next `steps` tokens of every running sample, oldest first; the youngest may
        lose theirs.
        """
        for sample in sorted(self.running, key=lambda sample: sample.arrival):
            while sample.slot is not None:
                tokens = min(sample.cached + self.steps, sample.limit - 1)
                missing = self.pages.needed(tokens) - len(sample.pages)
                taken = self.pages.take(missing) if missing > 0 else []
                if taken is not None:
                    sample.pages += taken
                    break
                self._make_room()
        return list(self.running)

    def _make_room(self) -> None:
        if self.resident:
            return self._drop(self.resident[-1])
        sample = max(self.running, key=lambda sample: sample.arrival)
        self.preemptions += 1
        self._leave(sample)
        # all in the queue came later than all that run
        self.queue.insert(0, Prefill(sample.tokens, [sample]))

    def _finish(self, sample: Sample, reason: str) -> None:
        sample.finish_reason = reason
        self._leave(sample)

    def _leave(self, sample: Sample) -> None:
        """Out of the batch; the last row takes the place, so that the others stay where they
        are.
        """
        if self.reuse:
            self.pages.publish(sample.tokens[: sample.cached], sample.pages)
        self.pages.release(sample.pages)
        self.slots.append(sample.slot)
        sample.pages = []
        sample.cached = 0
        sample.slot = None
        row = self.running.index(sample)
        self.running[row] = self.running[-1]
        self.running.pop()
