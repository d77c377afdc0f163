"""The scheduler: which prompts are prefilled next, which samples are decoded, and in which pages.

    waiting    prefills in order of arrival. A prefill is a sequence of tokens to compute once, and
               the samples that continue it: the n samples of one prompt, or one preempted sample
               with the tokens that it has produced
    resident   the first of the waiting prefills: they have pages. They are computed in chunks, up
               to their last token, which each sample decodes itself
    running    samples, each in a row of the decoding batch
    held       samples that have stopped, and keep their pages until they are resumed: a prefill of
               what has come meanwhile then goes on in these pages

A sample that joins the batch shares the full pages of its prefill and gets a copy of the last,
partly filled one, which it will write to. The last sample of a prefill takes over all its pages.
When pages run out, resident prefills return theirs first, then those who are held or about to go
on. Then the youngest sample is preempted: it returns to the queue as a prefill of its own. The
oldest sample always progresses, so every request that fits the pool alone is finished.

There are no tensors and no clock here: the same calls give the same schedule, so tensor-parallel
ranks need not communicate about it.
"""

from bisect import insort
from dataclasses import dataclass, field
from itertools import count, groupby
from operator import attrgetter

import numpy as np

from minitrain.errors import InputError
from minitrain.rollout.pages import Pages
from minitrain.rollout.sampling import SamplingParams


@dataclass(eq=False, kw_only=True)
class CacheEntry:
    """A sequence's part of the caches.

    pages: they hold its first `cached` tokens. slot: where its recurrent states are.
    stale: some of it was computed with earlier weights, so nobody else is to find it.
    """

    pages: list[int] = field(default_factory=list)
    cached: int = 0
    slot: int | None = None
    stale: bool = False

    def clear(self) -> None:
        self.pages = []
        self.cached = 0
        self.slot = None
        self.stale = False


@dataclass(eq=False)
class Sample(CacheEntry):
    """One continuation of a prompt.

    key: seed of its random numbers. limit: most tokens, the prompt's included.
    keeps: when it stops, it is held.
    versions: [n, version] where the weights that `produced` is drawn with change before token n.
    """

    prompt: list[int]
    params: SamplingParams
    key: int
    limit: int
    arrival: int = 0
    produced: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    finish_reason: str | None = None
    keeps: bool = False
    # guesses of the next tokens (drafting.py), if any
    drafts: list[int] = field(default_factory=list)
    # once it has ended: int16 [tokens - 1, layers x top_k], if the sampler records experts
    routes: np.ndarray | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.produced

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def newest(self, width: int) -> list[int]:
        """Return the newest token, and width - 1 drafts of those after it, 0 where there are none."""
        known = [(self.produced or self.prompt)[-1], *self.drafts]
        return known + [0] * (width - len(known))


@dataclass(eq=False)
class Prefill(CacheEntry):
    """Tokens, of which all but the last must be computed, for the samples that wait for them."""

    tokens: list[int]
    samples: list[Sample]

    @property
    def arrival(self) -> int:
        return self.samples[0].arrival

    @property
    def length(self) -> int:
        return len(self.tokens) - 1

    @property
    def is_done(self) -> bool:
        return self.cached == self.length


@dataclass
class Schedule:
    """The next work: copies first, then either chunks of prefills or decoding steps.

    page_copies, slot_copies: (from, to).
    chunks: (prefill, number of tokens to compute after its `cached`).
    samples: the rows of `steps` decoding steps, each with pages for all of them.
    """

    page_copies: list[tuple[int, int]] = field(default_factory=list)
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[tuple[Prefill, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    steps: int = 0


class Scheduler:
    """Assigns pages, slots and rows to sequences.

    rows: samples decoded at once. chunk: prompt tokens computed at once.
    steps: most decoding steps in one schedule.
    reuse: match new prompts against cached prefixes; impossible where layers have states.
    width: the most tokens that a step adds to a sample.
    """

    def __init__(
        self, pages: Pages, rows: int, chunk: int, steps: int, reuse: bool = True, width: int = 1
    ):
        self.pages = pages
        self.rows = rows
        self.chunk = chunk
        self.steps = steps
        self.reuse = reuse
        self.width = width
        self.waiting: list[Prefill] = []
        self.resident: list[Prefill] = []
        self.running: list[Sample] = []
        self.held: list[Sample] = []
        # one for each row, and one for a prefill that waits for a free row
        self.slots = list(range(rows + 1))[::-1]
        self.arrivals = count()
        self.last_was_prefill = False
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Return whether there is something to compute."""
        return bool(self.waiting or self.running)

    @property
    def idle(self) -> bool:
        """Return whether no sample has anything in the caches, or will."""
        return not (self.busy or self.held)

    def submit(self, samples: list[Sample]) -> None:
        """Queue the samples of one prompt. Raise InputError if they could never be finished."""
        first = samples[0]
        # a sample's last token is never cached: nothing follows it
        needed = self.pages.needed(first.limit - 1)
        if needed > self.pages.count:
            raise InputError(
                f"a request of {len(first.prompt)} prompt tokens and {first.limit - len(first.prompt)} new ones needs "
                f"{needed} pages of {self.pages.size} tokens, and the pool has {self.pages.count} "
                f"(use fewer tokens, or rollout.pages={needed})"
            )
        self.go_on(samples)

    def go_on(self, samples: list[Sample]) -> None:
        """Queue samples, new ones or those of `pause`. Neighbors with the same text are one prefill."""
        for sample in samples:
            sample.arrival = next(self.arrivals)
        for tokens, alike in groupby(samples, attrgetter("tokens")):
            self.waiting.append(Prefill(tokens, list(alike)))

    def pause(self) -> list[Sample]:
        """Take all samples out of the queue and the batch, and return them, oldest first.

        Nobody keeps pages, those who are held neither: they can still be resumed.
        """
        self.preempt_all()
        while self._drop():
            pass
        samples = [sample for prefill in self.waiting for sample in prefill.samples]
        self.waiting = []
        self.last_was_prefill = False
        return samples

    def outdate(self) -> None:
        """Keep what is cached for those who have it, and let no other find it: the weights change."""
        self.pages.reset()
        for entry in (*self.running, *self.held, *self.waiting):
            entry.stale = entry.cached > 0

    def resume(self, stopped: Sample, sample: Sample) -> None:
        """Queue `sample`, whose prompt begins with the text of `stopped`, in the place of that."""
        prefill = Prefill(sample.prompt, [sample])
        if stopped in self.held:
            self.held.remove(stopped)
            prefill.pages = stopped.pages
            prefill.cached = stopped.cached
            prefill.slot = stopped.slot
            prefill.stale = stopped.stale
            stopped.clear()
        self._return(prefill)

    def schedule(self) -> Schedule:
        """Choose the next work: chunks of prefills, or decoding steps.

        They alternate, so that long prompts do not hold up running samples.
        """
        work = Schedule()
        # prefill: pages for those that wait, as long as there are rows for their samples
        for prefill in self.waiting[len(self.resident) :]:
            if self._expected() >= self.rows or not self._start(prefill):
                break
        decodes_next = self.running and self.last_was_prefill
        work.chunks = [] if decodes_next else self._chunks()
        self.last_was_prefill = bool(work.chunks)
        if work.chunks:
            return work
        # decode: samples of finished prefills join the batch, in order
        while self.resident and len(self.running) < self.rows and self.resident[0].is_done:
            self._admit(self.resident[0], work)
        # pages for the next tokens of all, oldest first; the youngest are preempted if pages run out
        for sample in sorted(self.running, key=lambda sample: sample.arrival):
            # one that was preempted itself has no slot any more
            while sample.slot is not None and not self._grow(sample):
                self._preempt()
        work.samples = list(self.running)
        # the most tokens that any of them may still produce
        left = max((sample.limit - 1 - sample.cached for sample in work.samples), default=0)
        work.steps = min(self.steps, left)
        return work

    def prefilled(self, prefill: Prefill, tokens: int) -> None:
        """Record that the next `tokens` of `prefill` are in its pages."""
        prefill.cached += tokens
        self._publish(prefill)

    def decoded(
        self,
        sample: Sample,
        tokens: list[int],
        logprobs: list[float],
        finish_reason: str | None,
        whole: bool = True,
    ) -> None:
        """Record the tokens that `sample` has produced; end it if there is a `finish_reason`.

        whole: these are all that were computed.
        """
        sample.produced += tokens
        sample.logprobs += logprobs
        # a step caches its input: not the new token, but the one before it
        sample.cached += len(tokens)
        if not finish_reason:
            return
        self._leave(sample, finish_reason)
        # a state holds what was computed after the end, too; pages need not be read that far
        if sample.keeps and finish_reason == "stop" and (self.reuse or whole):
            self._hold(sample)
        else:
            self._free(sample)

    def cancel(self, sample: Sample) -> None:
        """End a sample, waiting, running or held; it keeps what it has produced."""
        if sample in self.running:
            self._leave(sample, "cancelled")
            self._free(sample)
        if sample in self.held:
            self.held.remove(sample)
            self._free(sample)
        for prefill in self.waiting:
            if sample in prefill.samples:
                prefill.samples.remove(sample)
                sample.finish_reason = "cancelled"
                if not prefill.samples:
                    self._evict(prefill)
                    self.waiting.remove(prefill)
                return

    def preempt_all(self) -> None:
        """Return all that is resident or running to the queue, to be computed again."""
        while self.resident or self.running:
            self._preempt()

    # --- prefills

    def _expected(self) -> int:
        """Return how many rows will be taken once all resident prefills are done."""
        return len(self.running) + sum(len(prefill.samples) for prefill in self.resident)

    def _start(self, prefill: Prefill) -> bool:
        """Give pages to a prefill; return False if it must wait.

        It waits until a page stays free for each sample that will need one: else it would soon be
        evicted again. It also waits for a prefix that another prefill is about to compute, since
        prompts with a common beginning often come together.
        """
        kept = prefill.pages
        # of a sample that is resumed, or of other prompts that begin alike
        found = kept or self._find(prefill)
        if found is None:
            return False
        missing = max(0, self.pages.needed(prefill.length) - len(found))
        # running samples that have not all their pages yet
        growing = sum(
            self.pages.needed(sample.limit - 1) > len(sample.pages) for sample in self.running
        )
        # One more for the first of its own samples. Alone in the pool, it must start.
        alone = not (self.running or self.resident)
        spare = 0 if alone else growing + 1
        # nobody runs whose end would free pages for it: take them from those who only wait
        while alone and missing > self.pages.available:
            if not self._drop(but=prefill):
                break
        new = self.pages.allocate(missing) if missing + spare <= self.pages.available else None
        if new is None:
            if not kept:
                self.pages.free(found)
            return False
        if not kept:
            prefill.cached = len(found) * self.pages.size
        prefill.pages = found + new
        self.resident.append(prefill)
        if prefill.slot is None:
            prefill.slot = self._slot()
        return True

    def _find(self, prefill: Prefill) -> list[int] | None:
        """Return pages that hold a prompt's beginning; None if more are about to be computed."""
        if not self.reuse:
            return []
        found = self.pages.match_prefix(prefill.tokens[: prefill.length])
        if self._is_coming(prefill.tokens[: prefill.length], len(found) + 1):
            self.pages.free(found)
            return None
        return found

    def _is_coming(self, tokens: list[int], pages: int) -> bool:
        """Return whether a resident prefill will soon fill the first `pages` pages of `tokens`."""
        # in tokens
        size = pages * self.pages.size
        return size <= len(tokens) and any(
            other.tokens[:size] == tokens[:size]
            for other in self.resident
            if other.cached < size <= other.length
        )

    def _evict(self, prefill: Prefill) -> None:
        """Free the pages of a prefill, if it has any; it is computed again later."""
        if prefill in self.resident:
            self.resident.remove(prefill)
        self._free(prefill)

    def _chunks(self) -> list[tuple[Prefill, int]]:
        """Return the next chunks, (prefill, number of tokens), of at most `chunk` tokens in all."""
        left = self.chunk
        chunks = []
        for prefill in self.resident:
            missing = prefill.length - prefill.cached
            tokens = min(left, missing)
            # only the first prefill is split: each chunk costs a mask and an attention call
            if chunks and tokens < missing:
                break
            # 0 if it is done, and waits for rows
            if tokens > 0:
                chunks.append((prefill, tokens))
                left -= tokens
        return chunks

    # --- samples

    def _admit(self, prefill: Prefill, work: Schedule) -> None:
        """Move the next sample of a finished prefill into the batch."""
        sample = prefill.samples.pop(0)
        # the last sample needs no copy, and without a free page no sample can have one
        if not prefill.samples or not self._fork(prefill, sample, work):
            self._take_over(prefill, sample)
        sample.cached = prefill.length
        self.running.append(sample)

    def _publish(self, entry: Sample | Prefill) -> None:
        """Let prompts that begin like a sequence find its full pages."""
        if self.reuse and not entry.stale:
            self.pages.insert(entry.tokens[: entry.cached], entry.pages)

    def _fork(self, prefill: Prefill, sample: Sample, work: Schedule) -> bool:
        """Share the full pages and copy the last one. Return False if no page is left for it."""
        # full pages, and tokens in the last, partly filled one
        full, partly = divmod(prefill.length, self.pages.size)
        # one page, or none to copy; later prefills must make room for it
        while (tail := self.pages.allocate(min(partly, 1))) is None:
            if self.resident[-1] is not prefill:
                self._evict(self.resident[-1])
            elif not self._drop():
                return False
        self.pages.incref(prefill.pages[:full])
        sample.pages = prefill.pages[:full] + tail
        sample.slot = self._slot()
        sample.stale = prefill.stale
        work.page_copies += [(prefill.pages[full], page) for page in tail]
        work.slot_copies.append((prefill.slot, sample.slot))
        return True

    def _take_over(self, prefill: Prefill, sample: Sample) -> None:
        """Move the prefill's pages to the sample; the prefill's other samples must start again."""
        # with other samples left, the prefill stays in `waiting`
        sample.pages = prefill.pages
        sample.slot = prefill.slot
        sample.stale = prefill.stale
        prefill.clear()
        self.resident.remove(prefill)
        if not prefill.samples:
            self.waiting.remove(prefill)

    def _grow(self, sample: Sample) -> bool:
        """Allocate pages for a sample's next `steps` steps. Return False if too few are left."""
        tokens = min(sample.cached + self.steps * self.width, sample.limit - 1)
        missing = self.pages.needed(tokens) - len(sample.pages)
        new = self.pages.allocate(missing) if missing > 0 else []
        if new is None:
            return False
        sample.pages += new
        return True

    def _preempt(self) -> None:
        """Free pages: of the last resident prefill, of one who waits, or of the youngest sample."""
        if self.resident:
            return self._evict(self.resident[-1])
        if self._drop():
            return
        sample = max(self.running, key=lambda sample: sample.arrival)
        self.preemptions += 1
        self._leave(sample)
        self._free(sample)
        self._return(Prefill(sample.tokens, [sample]))

    def _return(self, prefill: Prefill) -> None:
        """Queue a sample that has run: by arrival, so before all that have not."""
        insort(self.waiting, prefill, lo=len(self.resident), key=lambda each: each.arrival)

    def _leave(self, sample: Sample, reason: str | None = None) -> None:
        """Take a sample out of the batch. The last row takes its place, so that others keep theirs."""
        sample.finish_reason = reason
        row = self.running.index(sample)
        self.running[row] = self.running[-1]
        self.running.pop()

    # --- those who have pages, but neither a row nor a turn to be computed

    def _hold(self, sample: Sample) -> None:
        """Let a sample that has left the batch keep its pages, and its states if it has any."""
        self.held.append(sample)
        if self.reuse:
            self.slots.append(sample.slot)
            sample.slot = None

    def _drop(self, but: Prefill | None = None) -> bool:
        """Free what the youngest of them keeps, which is computed again later.

        Return False if there is none, `but` aside.
        """
        waiting = self.waiting[len(self.resident) :]
        idle = self.held + [each for each in waiting if each.pages and each is not but]
        if not idle:
            return False
        youngest = max(idle, key=lambda each: each.arrival)
        if youngest in self.held:
            self.held.remove(youngest)
        self._free(youngest)
        return True

    def _slot(self) -> int:
        """Return a free slot. Those who only wait keep theirs as long as nobody needs it."""
        while not self.slots:
            if not self._drop():
                raise AssertionError("no slot is free, and no sample that waits has one")
        return self.slots.pop()

    def _free(self, entry: Sample | Prefill) -> None:
        """Free what a sequence has in the caches, if anything."""
        # before they are freed: a prompt that continues this text finds them
        self._publish(entry)
        self.pages.free(entry.pages)
        if entry.slot is not None:
            self.slots.append(entry.slot)
        entry.clear()
