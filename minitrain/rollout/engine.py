"""The sampler: continues many prompts at once with a model that stays the trainer's.

    submit     queues the samples of a prompt
    step       runs what the scheduler chooses: chunks of prompts, or some decoding steps of all
               running samples
    generate   submits everything and steps until all is done

A decoding step goes scheduler -> prepare -> model -> sample -> scheduler. It is one forward pass
over one token per row, whose head samples the next tokens. Rows are padded to a few fixed numbers
(1, 2, 4, ...), and everything that changes between steps is in buffers with fixed addresses. So on
CUDA the step is captured as a graph once per number of rows, and replayed `steps` times before the
host looks at the tokens. Tokens after a sample's end are dropped then.

Tensor parallel: every rank of the group calls the same methods in the same order. Schedules are
equal because nothing but these calls decides them, tokens because ranks exchange their candidates.
Rows are padded to a multiple of the ranks, for sequence parallelism. With expert parallelism over
the same ranks, tokens travel to the experts and back. Left out: pipeline parallel, speculative
decoding, and graphs of steps in which the host must wait for the device (`waits_for_device`).
"""

import gc
import math
import operator
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import find_ends
from minitrain.parallel.tensor_decoder import tensor_parallel_size
from minitrain.rollout.batch import Batch
from minitrain.rollout.caches import Caches
from minitrain.rollout.capacity import check_page_size, page_count, sends_tokens, waits_for_device
from minitrain.rollout.pages import Pages
from minitrain.rollout.sampling import Completion, SamplingParams, sample_key
from minitrain.rollout.scheduler import Prefill, Sample, Schedule, Scheduler
from minitrain.rollout.steps import Chunk, PromptStep, on_device
from minitrain.rollout.streaming import stream
from minitrain.rollout.weights import SamplerWeights
from minitrain.settings import Rollout


class Sampler:
    """Continues prompts with `model`, whose weights it uses in place.

    tokenizer: needed for prompts that are text and for stop strings. Samples end at its end of
    text, too.
    samples: the largest number of samples that will be asked for at once. longest: the largest
    number of tokens of a sample, its prompt included. Both bound the memory of the caches.
    After the weights have changed, call `refresh`. Not to be used while the model trains.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer=None,
        settings: Rollout | None = None,
        samples: int | None = None,
        longest: int | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings or Rollout()
        self.slots = min(samples or self.settings.slots, self.settings.slots)
        self.config = model.config
        self.weights = SamplerWeights(model)
        self.ends = find_ends(model.config, tokenizer.eos_id if tokenizer else None)
        positions = self.config.max_position_embeddings
        self.longest = min(longest or positions, positions)
        # with FSDP or expert parallelism the host's work differs from step to step
        self.compiles = self.settings.compile and not (
            isinstance(model, FSDPModule) or sends_tokens(model)
        )
        self.device = model.head_weight.device
        self.tp = tensor_parallel_size(model)
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            check_page_size(self.settings.page_size, self.config, self.tp)
        # the most in one schedule, for which there are buffers
        self.steps = min(self.settings.steps or (16 if on_cuda else 1), self.longest)
        self.scheduler: Scheduler | None = None
        # pages of the pool when it was last allocated
        self.page_count = 0
        # whether the caches may hold NaN or infinity: a page that another sample takes over keeps
        # them, and masked keys count 0 x NaN = NaN
        self.has_nan = False

    # ------------------------------------------------------------------------------------------------------ requests

    @torch.inference_mode(False)
    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        """Return the samples of all prompts in order: prompt 0's n samples, prompt 1's, ...

        prompts: each a list of token ids, or text, which the tokenizer encodes as a prompt.
        params: one for all prompts, or one for each. A prompt's random numbers depend on the seed
        and, with one for all, on its place in the list.
        Raises InputError for a prompt that the model or the pool cannot hold.
        """
        shared = not isinstance(params, list | tuple)
        if isinstance(prompts, str):
            raise InputError("prompts must be a list, of texts or of lists of token ids")
        each = [params] * len(prompts) if shared else params
        if len(each) != len(prompts):
            raise InputError(
                f"{len(prompts)} prompts and {len(each)} SamplingParams: give one, or one per prompt"
            )
        samples = []
        try:
            for number, pair in enumerate(zip(prompts, each, strict=True)):
                samples += self.submit(*pair, number=number if shared else 0)
            with self.weights.in_use():
                while self.busy:
                    self.step()
        except BaseException:
            # an interrupt too must leave nothing queued
            self.cancel(*samples)
            raise
        return [Completion(each.produced, each.logprobs, each.finish_reason) for each in samples]

    @torch.inference_mode(False)
    def submit(
        self, prompt: Sequence[int] | str, params: SamplingParams, number: int = 0
    ) -> list[Sample]:
        """Queue a prompt; return its n samples, to which `step` adds tokens.

        number: of the request. With params.seed it decides the random numbers.
        """
        if not isinstance(params, SamplingParams):
            raise InputError(f"params={params!r:.60} must be SamplingParams")
        prompt = self.tokens_of(prompt)
        limit = self.longest
        vocabulary = self.config.vocab_size
        if not 1 <= len(prompt) < limit:
            raise InputError(
                f"a prompt of {len(prompt)} tokens: use 1 to {limit - 1}, there are {limit} positions"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < vocabulary)
            raise InputError(
                f"a prompt holds the token {wrong}: use 0 to {vocabulary - 1}, the model knows no others"
            )
        if params.stop and self.tokenizer is None:
            raise InputError(f"sampling stop={list(params.stop)} needs a sampler with a tokenizer")
        if self.has_nan and not self.busy:
            self.free()
        if self.scheduler is None:
            self._allocate()
        total = min(len(prompt) + params.max_tokens, limit)
        keys = (sample_key(params.seed, number, i) for i in range(params.n))
        samples = [Sample(prompt, params, key, total) for key in keys]
        self.scheduler.submit(samples)
        return samples

    def tokens_of(self, prompt: Sequence[int] | str) -> list[int]:
        """Return the token ids of a prompt. Raise InputError unless it is text or a list of ids."""
        if not isinstance(prompt, str):
            try:
                return list(map(operator.index, [prompt] if isinstance(prompt, bytes) else prompt))
            except TypeError:
                raise InputError(
                    f"a prompt is {prompt!r:.60}: give a list of token ids, or text"
                ) from None
        if self.tokenizer is None:
            raise InputError(
                f"the prompt {prompt!r:.60} is text, which needs a sampler with a tokenizer"
            )
        return self.tokenizer.encode_prompt(prompt)

    def generate_text(self, prompts: Sequence, params: SamplingParams | None = None) -> list[str]:
        """Return the samples of all prompts in order as text, without the tokens that end them."""
        samples = []
        for number, prompt in enumerate(prompts):
            samples += self.submit(prompt, params or SamplingParams(), number)
        return ["".join(self.follow(sample)) for sample in samples]

    def stream(
        self, prompt: Sequence[int] | str, params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Return the text that follows a prompt in pieces, each as soon as it is certain."""
        return self.follow(*self.submit(prompt, params or SamplingParams()))

    def follow(self, sample: Sample) -> Iterator[str]:
        """Yield the text of a submitted sample as it comes, without the token that ends it."""
        ends = (*self.ends, *sample.params.stop_tokens)

        def tokens() -> Iterator[int]:
            seen = 0
            while seen < len(sample.produced) or sample.finish_reason is None:
                if seen == len(sample.produced):
                    self.step()
                new = sample.produced[seen:]
                seen += len(new)
                yield from (token for token in new if token not in ends)

        with self.weights.in_use():
            yield from stream(self.tokenizer, tokens(), sample.prompt)

    # the caches outlive inference mode, in which they could not be changed outside it
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[tuple[Sample, list[int]]]:
        """Run the next schedule. Return the samples that have new tokens, with these tokens.

        Many steps are best taken `with sampler.weights.in_use()`, as in `generate`: else each one
        prepares the model and restores it. After an interrupt within a step, later steps continue
        as if there had been none. Tokens of the broken step may be in the samples, unreturned.
        """
        with self.weights.in_use():
            work = self.scheduler.schedule()
            try:
                if work.page_copies or work.slot_copies:
                    self.caches.copy(work.page_copies, work.slot_copies, self.device)
                if work.chunks:
                    self._prefill(work.chunks)
                    return []
                return self._decode(work) if work.samples else []
            except BaseException:
                # Mamba's states may include the step's tokens: compute them again
                self.scheduler.preempt_all()
                raise

    def cancel(self, *samples: Sample) -> None:
        """End samples between two steps; they keep what they have produced."""
        # after `free` all have ended
        if self.scheduler is not None:
            for sample in samples:
                self.scheduler.cancel(sample)

    @property
    def busy(self) -> bool:
        return self.scheduler is not None and self.scheduler.busy

    def refresh(self) -> None:
        """Drop all that was computed with earlier weights. Needs an idle sampler."""
        self.weights.refresh()
        self.forget()
        if self.scheduler is None or not self.caches.refresh():
            return
        for batch in self.batches.values():
            # graphs read constants that were computed from the weights
            batch.captured.clear()
        if self.device.type == "cuda":
            # a handle is dead once all of its graphs are
            self.graph_pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Empty the prefix cache. Needs an idle sampler."""
        self._must_be_idle()
        if self.scheduler is not None:
            self.scheduler.pages.reset()

    def free(self) -> None:
        """Free the caches; the next request allocates them again. Needs an idle sampler."""
        self._must_be_idle()
        self.weights.refresh()
        self.scheduler = None
        self.caches = None
        self.batches = None
        self.has_nan = False
        if self.device.type == "cuda":
            # the compiler leaves reference cycles, which hold the first inputs of a kernel
            gc.collect()

    def _must_be_idle(self) -> None:
        if self.busy:
            raise RuntimeError(
                "the sampler has unfinished requests: step until it is not busy, or cancel them"
            )

    # --------------------------------------------------------------------------------------------------------- steps

    def _prefill(self, chunks: list[tuple[Prefill, int]]) -> None:
        """Compute the next tokens of some prompts, (prefill, number of tokens), all in one row."""
        size = self.settings.page_size
        # (token, position, page, offset in it) of each token
        rows = []
        step_chunks = []
        for prefill, count in chunks:
            end = prefill.cached + count
            pages = on_device(prefill.pages[: self.scheduler.pages.needed(end)], self.device)
            step_chunks.append(Chunk(len(rows), count, prefill.cached, pages, prefill.slot))
            for i in range(prefill.cached, end):
                rows.append((prefill.tokens[i], i, prefill.pages[i // size], i % size))
        rows += [(0, 0, self.caches.null_page, 0)] * (-len(rows) % self.tp)
        tokens, positions, *kv_index = on_device(rows, self.device).T.contiguous()
        self.caches.step = PromptStep(tuple(kv_index), step_chunks)
        self.model(
            tokens[None],
            positions=positions[None],
            # nothing to do: a decoding step samples the next token
            head=lambda hidden, *_: hidden,
            cache=self.caches,
        )
        for prefill, count in chunks:
            self.scheduler.prefilled(prefill, count)

    def _decode(self, work: Schedule) -> list[tuple[Sample, list[int]]]:
        """Produce `work.steps` tokens for each sample, and drop those after its end.

        Raises InputError for logits that are not finite.
        """
        batch = self._batch(len(work.samples))
        batch.prepare(work.samples, work.steps)
        all_tokens, all_logprobs = batch.run(work.steps)
        produced = []
        # without the padding rows
        rows = zip(work.samples, all_tokens, all_logprobs, strict=False)
        for sample, tokens, logprobs in rows:
            count, reason = self._end(sample, tokens)
            # of all tokens: those after the sample's end are in the caches, too
            self.has_nan |= not math.isfinite(sum(logprobs))
            if not math.isfinite(sum(logprobs[:count])):
                raise InputError(
                    "the model's logits are not finite: weights hold NaN or infinity, or are too large"
                )
            self.scheduler.decoded(sample, tokens[:count], logprobs[:count], reason)
            produced.append((sample, tokens[:count]))
        return produced

    def _end(self, sample: Sample, tokens: list[int]) -> tuple[int, str | None]:
        """Return how many of the new tokens count, and why the sample ends there, or None."""
        params = sample.params
        ends = params.stop_tokens if params.ignore_eos else (*params.stop_tokens, *self.ends)
        for count, token in enumerate(tokens, 1):
            if token in ends or (params.stop and self._wrote_stop(sample, tokens[:count])):
                return count, "stop"
            if len(sample.prompt) + len(sample.produced) + count == sample.limit:
                return count, "length"
        return len(tokens), None

    def _wrote_stop(self, sample: Sample, tokens: list[int]) -> bool:
        """Return whether the text's end holds a stop string.

        As many tokens are decoded as the longest string may take, four for each character. One more
        stands before them: many vocabularies drop a space at the start of a text.
        """
        length = 4 * max(map(len, sample.params.stop)) + 5
        end = (sample.prompt[-1:] + sample.produced + tokens)[-length:]
        for special in (False, True):
            before = self.tokenizer.decode(end[:1], special)
            text = self.tokenizer.decode(end, special)
            if any(stop in text[len(before) :] for stop in sample.params.stop):
                return True
        return False

    # ------------------------------------------------------------------------------------------------------- buffers

    def _allocate(self) -> None:
        settings = self.settings
        # states are not found again by a prefix
        reuse = "M" not in self.config.layer_pattern
        size = settings.page_size
        self.page_count = page_count(
            self.model, settings, self.slots, self.longest, self.page_count
        )
        pages = Pages(self.page_count, size)
        self.scheduler = Scheduler(pages, self.slots, settings.chunk, self.steps, reuse)
        # a slot for each sample that is decoded, and one for a prefill that waits
        self.caches = Caches(self.config, pages.count, size, self.slots + 1)
        # of block tables, the null page included
        self.width = min(pages.needed(self.longest - 1), pages.count) + 1
        self.batches: dict[int, Batch] = {}
        self.graph_pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _batch(self, samples: int) -> Batch:
        """Return the buffers for that many rows, rounded up to a power of two."""
        rows = min(1 << (samples - 1).bit_length(), self.slots)
        rows = -(-rows // self.tp) * self.tp
        if rows not in self.batches:
            graphs = self.device.type == "cuda" and not waits_for_device(self.model)
            self.batches[rows] = Batch(self, rows, graphs)
        return self.batches[rows]
