"""The page allocator and the scheduler under random schedules, on a pool that remembers what was written to it."""

import random
from collections import Counter

import pytest

from minitrain.errors import InputError
from minitrain.rollout.pages import Pages
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample, Scheduler
from tests.helpers.sampling import check_books


class Pool:
    """Pages that hold, for each token, all tokens of its sequence up to it: what a key depends on."""

    def __init__(self, pages: Pages):
        self.pages, self.held = pages, [[None] * pages.size for _ in range(pages.count)]

    def write(self, tokens, pages, place):
        page = pages[place // self.pages.size]
        assert self.pages.ref_count[page] == 1 and page not in self.pages.prefix_of, (
            "a shared page is written to"
        )
        self.held[page][place % self.pages.size] = tuple(tokens[: place + 1])

    def check(self, tokens, pages, count):
        for place in range(count):
            page = pages[place // self.pages.size]
            assert self.pages.ref_count[page] >= 1
            assert self.held[page][place % self.pages.size] == tuple(tokens[: place + 1]), (
                "another sequence's page"
            )

    def copy(self, source, target):
        self.held[target] = list(self.held[source])


def random_schedule(seed: int) -> None:
    rng = random.Random(seed)
    pages = Pages(count=rng.randint(3, 10), size=rng.randint(1, 3))
    pool, live = Pool(pages), []  # of (tokens, pages)

    def begin():
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 6))]
        mine = pages.match_prefix(tokens)
        kept = len(mine) * pages.size
        pool.check(tokens, mine, kept)
        more = pages.allocate(pages.needed(len(tokens)) - len(mine))
        if more is None:
            return pages.free(mine)
        mine += more
        for place in range(kept, len(tokens)):
            pool.write(tokens, mine, place)
        live.append((tokens, mine))

    def fork():
        tokens, theirs = rng.choice(live)
        full, partly = divmod(len(tokens), pages.size)
        tail = pages.allocate(bool(partly))
        if tail is not None:
            pages.incref(theirs[:full])
            for page in tail:
                pool.copy(theirs[full], page)
            live.append((list(tokens), theirs[:full] + tail))

    def append():
        tokens, mine = rng.choice(live)
        more = pages.allocate(pages.needed(len(tokens) + 1) - len(mine))
        if more is not None:
            mine += more
            tokens.append(rng.randrange(2))
            pool.write(tokens, mine, len(tokens) - 1)

    def publish():
        pages.insert(*rng.choice(live))

    def release():
        tokens, mine = live.pop(rng.randrange(len(live)))
        pool.check(tokens, mine, len(tokens))
        pages.free(mine)

    for _ in range(20):
        rng.choice([append, append, publish, fork, release, begin] if live else [begin])()
    if rng.random() < 0.1:
        pages.reset()
        assert not pages.evictable
    for tokens, mine in live:
        pool.check(tokens, mine, len(tokens))
    check_books(pages, [mine for _, mine in live])


def test_ten_thousand_schedules_of_the_allocator():
    for seed in range(10_000):
        random_schedule(seed)


def test_a_double_release_is_noticed():
    pages = Pages(2, 4)
    taken = pages.allocate(1)
    pages.free(taken)
    with pytest.raises(AssertionError, match="has no owner"):
        pages.free(taken)


def test_the_longest_unused_goes_first_and_tails_before_heads():
    pages = Pages(4, 1)
    for tokens in ([1, 2], [3, 4]):
        taken = pages.allocate(2)
        pages.insert(tokens, taken)
        pages.free(taken)
    pages.free(pages.match_prefix([1, 2]))  # used again
    taken = pages.allocate(1)
    assert len(pages.match_prefix([3, 4])) == 1 and len(pages.match_prefix([1, 2])) == 2
    assert pages.allocate(1) is None and len(taken) == 1


def plan_and_compute(scheduler: Scheduler):
    """A step's work, of which the prompts are computed; decoding is for the caller."""
    work = scheduler.schedule()
    for prefill, count in work.chunks:
        scheduler.prefilled(prefill, count)
    return work


def test_a_request_that_fills_the_pool_is_finished():
    """No page is left for others, and none has to be."""
    scheduler = Scheduler(Pages(1, 4), rows=2, chunk=8, steps=1)
    sample = Sample([1, 2, 3, 4], SamplingParams(), key=0, limit=5)
    scheduler.submit([sample])
    assert len(plan_and_compute(scheduler).chunks) == 1
    assert scheduler.schedule().samples == [sample]
    scheduler.decoded(sample, [5], [0.0], "length")
    assert not scheduler.busy


def run_scheduler(seed: int, turns: int = 0) -> Counter:
    """Random requests, arrivals, cancellations and pools; every sample must end with the tokens it would have alone.

    turns: samples stop at zeros, and so often go on behind given tokens, some time later. Returns how often samples
    were preempted, and of those that went on, how many had kept all their pages, and how many had lost them.
    """
    rng = random.Random(seed)
    size, rows, steps, reuse = (
        rng.randint(1, 4),
        rng.randint(1, 4),
        rng.randint(1, 3),
        rng.random() < 0.7,
    )
    pages = Pages(rng.randint(16 // size, 40 // size), size)
    scheduler = Scheduler(pages, rows, rng.randint(1, 12), steps, reuse)
    pool, states, samples, cancelled = Pool(pages), [()] * (rows + 1), [], set()
    requests, counts = rng.randint(1, 4), Counter()
    stopped, turn = [], Counter()

    def next_token(sample, place):
        return (sample.key * 31 + place * 7 + sample.prompt[0]) % 3

    def submit():
        prompt, n = [rng.randrange(2) for _ in range(rng.randint(1, 9))], rng.randint(1, 4)
        limit = len(prompt) + rng.randint(1, 6)
        new = [
            Sample(prompt, SamplingParams(), rng.randrange(9), limit, keeps=bool(turns))
            for _ in range(n)
        ]
        scheduler.submit(new)
        samples.extend(new)

    def decode(sample):
        tokens = sample.tokens
        for _ in range(steps):
            place = len(tokens) - 1
            if place < sample.limit - 1:
                pool.check(tokens, sample.pages, place)
                assert reuse or place == 0 or states[sample.slot] == tuple(tokens[:place])
                pool.write(tokens, sample.pages, place)
                states[sample.slot] = tuple(tokens)
            tokens.append(next_token(sample, place + 1))
        new = tokens[len(sample.prompt) + len(sample.produced) :][
            : sample.limit - len(sample.tokens)
        ]
        done = "length" if len(sample.tokens) + len(new) == sample.limit else None
        if turn[id(sample)] < turns and 0 in new:
            new, done = new[: new.index(0) + 1], "stop"
            stopped.append(sample)
        scheduler.decoded(sample, new, [0.0] * len(new), done)

    def after_cached(sample):
        return next(each.cached for each in scheduler.waiting if each.samples == [sample])

    def resume(sample):
        given = [rng.randrange(2) for _ in range(rng.randint(1, 4))]
        prompt = sample.tokens + given
        limit = min(len(prompt) + 3, pages.count * size + 1)
        if limit <= len(prompt):
            return scheduler.cancel(sample)
        after = Sample(prompt, sample.params, sample.key, limit, sample.arrival)
        after.keeps = True
        kept = sample in scheduler.held
        counts["kept" if kept else "lost"] += 1
        cached = sample.cached
        scheduler.resume(sample, after)
        assert after_cached(after) == cached == (len(sample.tokens) - 1 if kept else 0)
        turn[id(after)] = turn[id(sample)] + 1
        samples.append(after)

    for _ in range(4000):
        if stopped and (not scheduler.busy or rng.random() < 0.2):
            resume(stopped.pop(rng.randrange(len(stopped))))
        if requests and (not scheduler.busy or rng.random() < 0.3):
            submit()
            requests -= 1
        if not scheduler.busy and not stopped:
            break
        work = scheduler.schedule()
        for source, target in work.page_copies:
            pool.copy(source, target)
        for source, target in work.slot_copies:
            states[target] = states[source]
        for prefill, count in work.chunks:
            pool.check(prefill.tokens, prefill.pages, prefill.cached)
            for place in range(prefill.cached, prefill.cached + count):
                pool.write(prefill.tokens, prefill.pages, place)
            states[prefill.slot] = tuple(prefill.tokens[: prefill.cached + count])
            scheduler.prefilled(prefill, count)
        slots = [sample.slot for sample in work.samples]
        assert len(set(slots)) == len(slots) <= rows
        for sample in work.samples:
            decode(sample)
        if samples and rng.random() < 0.02:
            victim = rng.choice(samples)
            scheduler.cancel(victim)
            cancelled |= {id(victim)} if victim.finish_reason == "cancelled" else set()
            stopped[:] = [sample for sample in stopped if sample is not victim]
        owned = (*scheduler.waiting, *scheduler.running, *scheduler.held)
        check_books(pages, [each.pages for each in owned])
    assert scheduler.idle and not requests
    assert pages.available == pages.count and sorted(scheduler.slots) == list(range(rows + 1))
    for sample in samples:
        expected = [
            next_token(sample, place) for place in range(len(sample.prompt), sample.limit)
        ]
        end = "length"
        if turn[id(sample)] < turns and 0 in expected:
            expected, end = expected[: expected.index(0) + 1], "stop"
        if id(sample) in cancelled:
            expected, end = expected[: len(sample.produced)], "cancelled"
        assert sample.produced == expected and sample.finish_reason == end
    return counts + Counter(preemptions=scheduler.preemptions)


def test_schedules_lose_nothing():
    counts = sum((run_scheduler(seed) for seed in range(400)), Counter())
    assert counts["preemptions"] > 100


def test_schedules_lose_nothing_of_samples_that_stop_and_go_on():
    counts = sum((run_scheduler(seed, turns=2) for seed in range(400)), Counter())
    assert min(counts["preemptions"], counts["kept"], counts["lost"]) > 100, counts


def test_a_request_that_never_fits_is_refused_with_the_numbers():
    scheduler = Scheduler(Pages(3, 4), rows=2, chunk=8, steps=1)
    scheduler.submit([Sample([1] * 8, SamplingParams(), 0, limit=13)])
    with pytest.raises(InputError) as refused:
        scheduler.submit([Sample([1] * 8, SamplingParams(), 0, limit=14)])
    assert str(refused.value) == (
        "a request of 8 prompt tokens and 6 new ones needs 4 pages of 4 tokens, and the pool has 3 "
        "(use fewer tokens, or rollout.pages=4)"
    )


def test_samples_of_a_prompt_share_its_full_pages():
    pages = Pages(20, 4)
    scheduler = Scheduler(pages, rows=4, chunk=100, steps=1)
    samples = [Sample([1] * 11, SamplingParams(), 0, limit=20) for _ in range(3)]
    scheduler.submit(samples)
    [(_, count)] = plan_and_compute(scheduler).chunks
    assert count == 10  # the last token is decoded
    work = scheduler.schedule()
    assert (
        len({tuple(sample.pages[:2]) for sample in samples}) == 1
        and len({s.pages[2] for s in samples}) == 3
    )
    assert len(work.page_copies) == 2 and pages.count - pages.available == 2 + 3


def test_only_the_first_prompt_of_a_chunk_is_cut():
    scheduler = Scheduler(Pages(40, 4), rows=4, chunk=16, steps=1)
    for length in (21, 9, 8):  # of which the last token is decoded
        scheduler.submit([Sample([length] * length, SamplingParams(), 0, limit=30)])
    for expected in ([16], [4, 8], [7]):
        assert [count for _, count in plan_and_compute(scheduler).chunks] == expected


def test_a_later_prompt_finds_the_pages_of_an_earlier_one():
    pages = Pages(20, 4)
    scheduler = Scheduler(pages, rows=4, chunk=100, steps=1)
    for prompt, computed in (([1] * 9 + [2] * 4, 12), ([1] * 9 + [3] * 4, 4), ([1] * 9, 0)):
        scheduler.submit([sample := Sample(prompt, SamplingParams(), 0, limit=14)])
        assert sum(count for _, count in plan_and_compute(scheduler).chunks) == computed
        scheduler.schedule()
        scheduler.decoded(sample, [0], [0.0], "stop")


def test_prompts_that_come_together_wait_for_the_pages_that_they_share():
    """As those of an evaluation do, with the same examples before each question: they are computed once."""
    scheduler = Scheduler(Pages(60, 4), rows=8, chunk=100, steps=1)
    for number in range(4):
        scheduler.submit([Sample([1] * 18 + [2 + number] * 8, SamplingParams(), 0, limit=30)])
    scheduler.submit([Sample([9] * 6, SamplingParams(), 0, limit=30)])
    counts = []
    while not counts or sum(map(len, counts)) < 5:
        counts.append([count for _, count in plan_and_compute(scheduler).chunks])
    # all but the last tokens; of three not the 16 that fill pages
    assert counts == [[25], [9, 9, 9, 5]]


def test_long_prompts_take_turns_with_those_who_decode():
    scheduler = Scheduler(Pages(40, 4), rows=4, chunk=4, steps=1)
    kinds = []
    for number in range(10):
        if number in (0, 2):
            scheduler.submit(
                [Sample([number] * (2 if number == 0 else 17), SamplingParams(), 0, limit=30)]
            )
        work = plan_and_compute(scheduler)
        for sample in work.samples:
            scheduler.decoded(sample, [0], [0.0], None)
        kinds.append("prompts" if work.chunks else len(work.samples))
    assert kinds == ["prompts", 1] + ["prompts", 1] * 3 + ["prompts", 2]


def run_alone(scheduler: Scheduler, sample: Sample, steps: int = 1) -> None:
    """Submit a sample of which all but the last prompt token is computed at once, and decode it."""
    scheduler.submit([sample])
    plan_and_compute(scheduler)
    for _ in range(steps):
        assert scheduler.schedule().samples == [sample]
        scheduler.decoded(sample, [0], [0.0], None)


@pytest.mark.parametrize(("pages", "rows"), [(3, 2), (40, 1)])
def test_a_prompt_waits_until_there_are_pages_to_go_on_and_a_row(pages, rows):
    """Two pages would do for it, but not for the next token of the one that runs."""
    scheduler = Scheduler(Pages(pages, 4), rows=rows, chunk=100, steps=1)
    first = Sample([1] * 4, SamplingParams(), 0, limit=12)
    run_alone(scheduler, first)
    scheduler.submit([Sample([2] * 9, SamplingParams(), 0, limit=12)])
    work = scheduler.schedule()
    assert (
        not scheduler.resident
        and not work.chunks
        and work.samples == [first]
        and scheduler.preemptions == 0
    )


def test_a_prompt_does_not_wait_for_those_who_have_all_their_pages():
    scheduler = Scheduler(Pages(3, 4), rows=2, chunk=100, steps=1)
    run_alone(scheduler, Sample([1] * 2, SamplingParams(), 0, limit=5))
    scheduler.submit([Sample([2] * 4, SamplingParams(), 0, limit=5)])
    assert scheduler.schedule().chunks


def test_no_more_steps_than_some_sample_has_left():
    scheduler = Scheduler(Pages(40, 4), rows=4, chunk=100, steps=5)
    samples = [Sample([1], SamplingParams(), 0, limit=limit) for limit in (4, 8)]
    for sample in samples:
        scheduler.submit([sample])
    assert scheduler.schedule().steps == 5  # of 3 and 7
    scheduler.decoded(samples[0], [0] * 3, [0.0] * 3, "length")
    scheduler.decoded(samples[1], [0] * 5, [0.0] * 5, None)
    assert scheduler.schedule().steps == 2


def test_preempted_samples_resume_before_later_ones():
    scheduler = Scheduler(Pages(8, 1), rows=2, chunk=100, steps=1)
    samples = [Sample([number] * 3, SamplingParams(), 0, limit=8) for number in range(3)]
    for sample in samples:
        scheduler.submit([sample])
    while not scheduler.preemptions:
        work = plan_and_compute(scheduler)
        for sample in work.samples if not scheduler.preemptions else []:
            scheduler.decoded(sample, [0], [0.0], None)
    assert work.samples == samples[:1] and [prefill.samples for prefill in scheduler.waiting] == [
        [each] for each in samples[1:]
    ]


def test_rows_stay_where_they_are_when_others_go():
    """But for the last, which takes the place: the CPU gathers anew what a row has that becomes another sample's."""
    scheduler = Scheduler(Pages(40, 4), rows=4, chunk=100, steps=1)
    samples = [Sample([1], SamplingParams(), 0, limit=9) for _ in range(4)]
    scheduler.submit(samples)
    assert scheduler.schedule().samples == samples
    scheduler.decoded(samples[1], [0], [0.0], "stop")
    assert scheduler.schedule().samples == [samples[0], samples[3], samples[2]]
