"""The sampler under load: random requests over a small pool of pages, cancelled at random, one sample or a whole group.

    python -m tests.faults.test_sampler_under_load --requests 2000 --seconds 300

Requests come faster than they are served, so that prompts wait, samples are interrupted, and pages change hands all the
time. In the end every sample is answered or was cancelled, none was answered twice, no page or state is left with an
owner, and what a sample got is what its request gets alone: greedy ones by full forward passes without any cache.
"""

import argparse
import collections
import functools
import random
import time

import pytest
import torch

from minitrain import Sampler, SamplingParams
from minitrain.errors import InputError
from minitrain.settings import Rollout
from tests.helpers.sampling import check_books, make, prompts_of, uncached

SMALL = Rollout(slots=5, page_size=4, pages=14, chunk=7)
LONGEST = 12  # tokens of a sample
LARGE = SamplingParams(max_tokens=60)  # more than the pool holds


class Client:
    """Sends `requests` random requests to a sampler of `model`, at most for so many seconds, and keeps the books."""

    def __init__(self, model, requests: int, seconds: float, seed: int):
        self.rng, self.requests, self.end = (
            random.Random(seed),
            requests,
            time.monotonic() + seconds,
        )
        self.model, self.sampler = model, Sampler(model, settings=SMALL)
        self.roomy = Sampler(model, settings=Rollout(slots=8, page_size=4, pages=200))
        # what prompts have in common, so that pages are found again
        begin = prompts_of((24, 18), seed)
        self.prompts = [
            tokens[:length] for tokens in begin for length in (1, 4, 5, 11, 16, len(tokens))
        ]
        self.asked: list[tuple] = []  # (prompt, params, number, its samples)
        self.got = collections.defaultdict(list)  # by sample: what `step` said it produced
        self.cancelled, self.ended = set(), set()
        self.refused = 0

    def run(self) -> None:
        while self.sampler.busy or len(self.asked) < self.requests:
            late = time.monotonic() > self.end
            if late and not self.sampler.busy:
                break
            waiting = len(self.sampler.scheduler.waiting) if self.sampler.busy else 0
            if (
                not late
                and len(self.asked) < self.requests
                and waiting < 10
                and self.rng.random() < 0.4
            ):
                self.submit()
            if self.asked and self.rng.random() < 0.1:
                self.cancel()
            if self.sampler.busy:
                self.step()

    def submit(self) -> None:
        rng, prompt, number = self.rng, self.rng.choice(self.prompts), self.rng.randrange(3)
        if rng.random() < 0.05:
            with pytest.raises(
                InputError, match="needs .* pages of 4 tokens, and the pool has 14"
            ):
                self.sampler.submit(prompt, LARGE)
            self.refused += 1
        params = SamplingParams(
            rng.choice([0, 0, 0.9]),
            max_tokens=rng.randint(1, LONGEST),
            n=rng.choice([1, 1, 2, 4]),
        )
        self.asked.append((prompt, params, number, self.sampler.submit(prompt, params, number)))

    def cancel(self) -> None:
        """What is waiting, running or long finished: of a recent request one sample, or all."""
        *_, samples = self.rng.choice(self.asked[-12:])
        chosen = samples if self.rng.random() < 0.5 else [self.rng.choice(samples)]
        self.cancelled.update(sample for sample in chosen if sample.finish_reason is None)
        self.sampler.cancel(*chosen)
        self.ended.update(chosen)

    def step(self) -> None:
        for sample, tokens in self.sampler.step():
            assert sample not in self.ended, "a sample goes on after its end"
            self.got[sample] += tokens
            self.ended.update([sample] if sample.finish_reason else [])
        scheduler = self.sampler.scheduler
        check_books(
            scheduler.pages, [each.pages for each in (*scheduler.resident, *scheduler.running)]
        )

    def check(self) -> None:
        scheduler = self.sampler.scheduler
        assert scheduler.pages.available == SMALL.pages and sorted(scheduler.slots) == list(
            range(SMALL.slots + 1)
        )
        for prompt, params, number, samples in self.asked:
            for i, sample in enumerate(samples):
                expected = self.reference(tuple(prompt), params.temperature, number, i)[
                    : params.max_tokens
                ]
                whole = sample not in self.cancelled
                assert sample.finish_reason == ("length" if whole else "cancelled")
                assert (
                    sample.produced
                    == self.got[sample]
                    == (expected if whole else expected[: len(sample.produced)])
                )
                assert len(sample.logprobs) == len(sample.produced)

    @functools.cache  # noqa: B019
    def reference(
        self, prompt: tuple[int, ...], temperature: float, number: int, i: int
    ) -> list[int]:
        """The tokens that the i-th sample of a request must get, whatever else goes on."""
        if not temperature:
            return self.greedy(prompt)
        samples = self.roomy.submit(
            prompt, SamplingParams(temperature, max_tokens=LONGEST, n=i + 1), number
        )
        while self.roomy.busy:
            self.roomy.step()
        return samples[i].produced

    @functools.cache  # noqa: B019
    def greedy(self, prompt: tuple[int, ...]) -> list[int]:
        return uncached(self.model, prompt, LONGEST)


def load(name: str, requests: int, seconds: float, seed: int) -> Client:
    client = Client(make(name), requests, seconds, seed)
    client.run()
    client.check()
    return client


@pytest.mark.parametrize("name", ["qwen3-32b", "nemotron3-nano-30b-a3b"])
def test_under_load(name):
    """Keys and values in pages; and states, which are not found again by their prompts."""
    client = load(name, requests=150, seconds=float("inf"), seed=0)
    assert len(client.asked) == 150 and client.refused > 2
    assert len(client.cancelled) > 20 and client.sampler.scheduler.preemptions > 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--model", default="qwen3-32b")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    client = load(options.model, options.requests, options.seconds, options.seed)
    samples = [sample for *_, each in client.asked for sample in each]
    print(
        f"{len(client.asked)} requests, {len(samples)} samples: {len(samples) - len(client.cancelled)} answered, "
        f"{len(client.cancelled)} cancelled; {client.refused} requests refused; "
        f"{client.sampler.scheduler.preemptions} interruptions; {sum(map(len, client.got.values()))} tokens; "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
