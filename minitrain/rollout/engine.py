"""The sampler: continues many prompts at once with a model that stays the trainer's.

    submit     queues the samples of a prompt
    step       runs what the scheduler chooses: chunks of prompts, or some decoding steps of all
               running samples
    generate   submits everything and steps until all is done
    resume     continues a sample that has stopped, behind tokens that it is given
    pause      takes unfinished samples off, while weights change; `go_on` queues them again

A decoding step goes scheduler -> prepare -> model -> sample -> scheduler: `schedule` (scheduler.py),
`prepare`, `decode` and `sample` (batch.py), `_end` here, `decoded` (scheduler.py). It is one
forward pass over one token of each sample, whose head samples the next tokens. A sample is a row.
A batch has 1, 2, 4, ... rows, some of them padding, and all that changes between steps is in
buffers with fixed addresses. So on CUDA a step is captured as a graph once per number of rows and
replayed `steps` times. Then the host looks at the tokens, and drops those after a sample's end.

With drafts (drafting.py) the pass covers several tokens of each sample, and reports how many of them
count.

Tensor parallel: every rank of the group calls the same methods in the same order. Ranks need not
communicate about schedules, which depend on these calls alone. They agree on tokens by exchanging
their best candidates. Rows are padded to a multiple of the ranks, for sequence parallelism. With
expert parallelism over the same ranks, tokens travel to the experts and back.

What a model must have (tests/rollout/test_own_gpt.py has one of its own):

    config       a DecoderConfig of its sizes: layers, heads, vocabulary, positions
    blocks       its layers; each takes its cache as an argument of its forward
    head_weight  the output matrix, [vocab, hidden]
    forward(tokens, positions=, head=, cache=)
                 the first two [1, tokens]. Layer i calls cache[i].attend(q, k, v) in place of causal
                 attention, all [1, heads, tokens, head_dim]. Returns head(hidden, head_weight, None)

Left out: pipeline parallel, graphs of steps that wait (`waits_for_device`).
"""

import gc
import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import find_ends
from minitrain.parallel.tensor_decoder import tensor_parallel_size
from minitrain.rollout.batch import DecodingBatch, compiled_blocks
from minitrain.rollout.caches import Caches
from minitrain.rollout.capacity import check_page_size, page_count, sends_tokens, waits_for_device
from minitrain.rollout.drafting import DraftingBatch, open_drafter
from minitrain.rollout.pages import Pages
from minitrain.rollout.sampling import Completion, SamplingParams, sample_key, with_settings
from minitrain.rollout.scheduler import Prefill, Sample, Schedule, Scheduler
from minitrain.rollout.steps import Chunk, PromptStep, on_device
from minitrain.rollout.texts import DEFAULTS, Prompt, TextMethods, TextTokenizer
from minitrain.rollout.weights import SamplerWeights
from minitrain.settings import Rollout


class Sampler(TextMethods):
    """Continues prompts with `model`, whose weights it uses in place.

    tokenizer: needed for prompts that are text or chats and for stop strings, as from
        minitrain.load_tokenizer. Samples also end at its end-of-text token.
    samples: the largest number of samples that will be asked for at once.
    longest: the largest number of tokens of a sample, its prompt included. Both bound the memory
        of the caches.
    draft: a smaller model of the same vocabulary, which guesses tokens (drafting.py). With
        rollout.draft=mtp the model does it itself.
    After the weights have changed, call `refresh`. Do not sample while the model trains.
    """

    # whether to keep the experts that are selected for each token, for `Completion.routes`
    records = False
    # of the weights, as who changes them counts; samples keep it for each token
    version = 0

    def __init__(
        self,
        model: Decoder,
        tokenizer: TextTokenizer | None = None,
        settings: Rollout | None = None,
        samples: int | None = None,
        longest: int | None = None,
        draft: Decoder | None = None,
    ):
        if tokenizer is not None and not hasattr(tokenizer, "eos_id"):
            raise InputError(
                f"tokenizer={tokenizer!r:.60} is none of ours (give minitrain.load_tokenizer(FOLDER))"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings or Rollout()
        # the most samples that are decoded at once
        self.rows = min(samples or self.settings.slots, self.settings.slots)
        self.config = model.config
        self.drafter = open_drafter(model, self.settings, draft)
        # the models, with the layers that are cached
        self.cached = [(model, range(model.config.num_layers))]
        # the most tokens of a sample that a decoding step computes, and produces
        self.width = 1
        if self.drafter:
            self.cached.append((self.drafter.model, self.drafter.layers))
            self.width += self.drafter.draft_tokens
        self.weights = SamplerWeights(model, self.drafter and self.drafter.weights)
        self.ends = find_ends(model.config, tokenizer.eos_id if tokenizer else None)
        positions = self.config.max_position_embeddings
        self.longest = min(longest or positions, positions)
        # under FSDP or expert parallelism the host's work differs from step to step
        self.compiles = self.settings.compile and not (
            isinstance(model, FSDPModule) or sends_tokens(model)
        )
        self.device = model.head_weight.device
        self.tp = tensor_parallel_size(model)
        on_cuda = self.device.type == "cuda"
        for each, _ in self.cached if on_cuda else ():
            tp = tensor_parallel_size(each)
            width = self.width if each is model else self.drafter.first_width
            check_page_size(self.settings.page_size, each.config, tp, width)
        # the most decoding steps in one schedule; the buffers hold the tokens of that number of steps
        steps = self.settings.steps or (-(-16 // self.width) if on_cuda else 1)
        self.steps = min(steps, self.longest)
        # the scheduler and the buffers, from the first request (`_allocate`) until `free`
        self.scheduler: Scheduler | None = None
        self.caches: Caches | None = None
        # rows -> the buffers of a decoding step
        self.batches: dict[int, DecodingBatch] = {}
        # of a block table
        self.columns = 0
        self.graph_pool: tuple[int, int] | None = None
        # pages of the pool when it was last allocated
        self.page_count = 0
        # whether the caches may hold NaN or infinity: a page keeps them for its next user, whose
        # masked keys would count 0 x NaN = NaN
        self.has_nan = False
        # those whose text somebody has begun to read
        self.followed: list[Sample] = []

    def __repr__(self) -> str:
        return (
            f"Sampler(a {type(self.model).__name__} of {self.config.num_layers} layers on "
            f"{self.device}, up to {self.rows:,} samples of {self.longest:,} tokens at once, "
            f"{'busy' if self.busy else 'idle'})"
        )

    # --- requests

    # caches made in inference mode could not be changed outside it: `_allocate` must be outside
    @torch.inference_mode(False)
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULTS,
        **settings,
    ) -> list[Completion]:
        """Return the samples of all prompts in order: prompt 0's n samples, prompt 1's, ...

        prompts: each a list of token ids, or text, which the tokenizer encodes as a prompt, or the
        messages of a chat, {"role": ..., "content": ...} each, which the next reply is to answer.
        params: one for all prompts, or one for each. A prompt's random numbers depend on the seed
        and, with one for all, on its place in the list.
        settings: fields of SamplingParams, such as max_tokens=20, which replace those of params.
        Raises InputError for a prompt that the model or the pool cannot hold.
        """
        with self._queued(prompts, params, settings) as samples, self.weights.in_use():
            while self.busy:
                self.step()
        return [
            Completion(sample.produced, sample.logprobs, sample.finish_reason, sample.routes)
            for sample in samples
        ]

    @torch.inference_mode(False)
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULTS,
        number: int = 0,
        first: int = 0,
        keep: bool = False,
        **settings,
    ) -> list[Sample]:
        """Queue a prompt; return its n samples, to which `step` adds tokens.

        number: of the request; first: of its first sample. With params.seed they decide the random
        numbers. keep: samples that stop keep their caches until they are resumed, or cancelled.
        """
        if not isinstance(params, SamplingParams):
            raise InputError(f"params={params!r:.60} must be SamplingParams")
        params = with_settings(params, settings)
        prompt, params = self._read(prompt, params)
        self._check_prompt(prompt, self.longest)
        total = min(len(prompt) + params.max_tokens, self.longest)
        # seeds of the samples' random numbers
        keys = (sample_key(params.seed, number, first + i) for i in range(params.n))
        samples = [Sample(prompt, params, key, total, keeps=keep) for key in keys]
        self._ready().submit(samples)
        return samples

    @torch.inference_mode(False)
    def resume(self, sample: Sample, tokens: Sequence[int]) -> Sample:
        """Queue what follows `tokens`, which are given, behind a sample that has stopped.

        Returns the sample of that. All the text before it is its prompt, with the same random numbers
        and the same limit. A sample that keeps its caches need not be computed again, unless memory
        was short in between. Raises InputError for tokens that leave no room, and for a sample that
        has not stopped.
        """
        if sample.finish_reason != "stop":
            raise InputError(
                f"only a sample that has stopped can be resumed: this one's end is {sample.finish_reason!r}"
            )
        prompt = sample.tokens + self.tokens_of(tokens)
        self._check_prompt(prompt, sample.limit)
        next_one = Sample(prompt, sample.params, sample.key, sample.limit, sample.arrival)
        next_one.keeps = sample.keeps
        self._ready().resume(sample, next_one)
        return next_one

    def _check_prompt(self, prompt: list[int], limit: int) -> None:
        """Raise InputError for tokens that the model does not know, or `limit` or more of them."""
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

    def _ready(self) -> Scheduler:
        """Return the scheduler; allocate it, and the caches, where there are none."""
        # new caches are free of it
        if self.has_nan and self.idle:
            self.free()
        if self.scheduler is None:
            self._allocate()
        return self.scheduler

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[tuple[Sample, list[int]]]:
        """Run the next schedule. Return the samples that have new tokens, with these tokens.

        Many steps are best taken `with sampler.weights.in_use()`, as in `generate`: else each one
        prepares the model and restores it. After an interrupt within a step, later steps continue
        as if there had been none. Tokens of the broken step may be in the samples, unreturned.
        """
        # before the first request, and after `free`
        if self.scheduler is None:
            return []
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
                # recurrent states may include the step's tokens: compute them again
                self.scheduler.preempt_all()
                raise

    def cancel(self, *samples: Sample) -> None:
        """End samples between two steps; they keep what they have produced."""
        # after `free` all have ended
        if self.scheduler is not None:
            for sample in samples:
                # others are looked for in the queue
                if sample.finish_reason is None or sample.keeps:
                    self.scheduler.cancel(sample)

    def pause(self) -> list[Sample]:
        """Take unfinished samples off, oldest first, with what they have produced; drop their caches."""
        return self.scheduler.pause() if self.scheduler else []

    @torch.inference_mode(False)
    def go_on(self, samples: list[Sample]) -> None:
        """Queue what `pause` has returned. What the samples have produced is computed once more."""
        if samples:
            self._ready().go_on(samples)

    @property
    def busy(self) -> bool:
        return self.scheduler is not None and self.scheduler.busy

    @property
    def idle(self) -> bool:
        return self.scheduler is None or self.scheduler.idle

    def refresh(self, keep: bool = False) -> None:
        """Drop all that was computed with earlier weights. Needs an idle sampler.

        keep: of a busy one. Samples go on with what they have, which later prompts do not find.
        """
        self.weights.refresh()
        if not keep:
            self.forget()
        elif self.scheduler is not None:
            self.scheduler.outdate()
        if self.scheduler is None or not self.caches.refresh():
            return
        # a pool of memory for graphs cannot be used again after its last graph is gone
        self.graph_pool = self._new_graph_pool()
        for batch in self.batches.values():
            # captured graphs read the dropped constants
            batch.drop_graphs(self.graph_pool)

    def forget(self) -> None:
        """Empty the prefix cache. Needs an idle sampler."""
        self._stop_streams_and_check_idle()
        if self.scheduler is not None:
            self.scheduler.pages.reset()

    def free(self) -> None:
        """Free the caches; the next request allocates them again. Needs an idle sampler."""
        self._stop_streams_and_check_idle()
        self.weights.refresh()
        self.scheduler = None
        self.caches = None
        self.batches = {}
        self.has_nan = False
        if self.device.type == "cuda":
            # the compiler leaves reference cycles, which hold a kernel's first inputs: pools
            gc.collect()

    def _stop_streams_and_check_idle(self) -> None:
        # streams that somebody holds, and does not read at this moment
        self.cancel(*self.followed)
        self.followed.clear()
        if not self.idle:
            raise RuntimeError(
                "the sampler has unfinished requests: step until it is not busy, or cancel them"
            )

    # --- steps

    @property
    def compiles_prefill(self) -> bool:
        return self.compiles and self.device.type == "cuda"

    def _prefill(self, chunks: list[tuple[Prefill, int]]) -> None:
        """Compute and cache the next tokens of prompts. chunks: (prefill, number of tokens)."""
        size = self.settings.page_size
        # what drafts may read the token after each one
        later = self.drafter.offset - 1 if self.drafter else 0
        # of each token: its id, its position in the sequence, its page, its offset in that
        entries = []
        step_chunks = []
        for prefill, count in chunks:
            end = prefill.cached + count
            pages = on_device(prefill.pages[: self.scheduler.pages.needed(end)], self.device)
            step_chunks.append(Chunk(len(entries), count, prefill.cached, pages, prefill.slot))
            for i in range(prefill.cached, end):
                read = prefill.tokens[i + later]
                entries.append((prefill.tokens[i], read, i, prefill.pages[i // size], i % size))
        # sequence parallelism needs a multiple of the ranks
        entries += [(0, 0, 0, self.caches.null_page, 0)] * (-len(entries) % self.tp)
        # [1, tokens] three times, and two [tokens]
        columns = on_device(entries, self.device).T.contiguous()
        tokens, read, positions = columns[:3, None]
        self.caches.step = PromptStep(tuple(columns[3:]), step_chunks)

        # no logits: a prompt's last token is left to the first decoding step
        def head(hidden: Tensor, *_) -> Tensor:
            if self.drafter:
                self.caches.drafts.step = self.caches.step
                self.drafter(read, hidden, positions, lambda *_: None, self.caches.drafts)
            return hidden

        models = [model for model, _ in self.cached]
        with compiled_blocks(*models) if self.compiles_prefill else nullcontext():
            self.model(tokens, positions=positions, head=head, cache=self.caches)
        for prefill, count in chunks:
            self.scheduler.prefilled(prefill, count)

    def _decode(self, work: Schedule) -> list[tuple[Sample, list[int]]]:
        """Run `work.steps` steps of each sample, and drop tokens after its end.

        Raises InputError for logits that are not finite.
        """
        batch = self._batch(len(work.samples))
        batch.prepare(work.samples, work.steps)
        # lists [rows][tokens]
        all_tokens, all_logprobs = batch.run(work.steps)
        produced = []
        # the padding rows come last: zip ends before them
        rows = zip(work.samples, all_tokens, all_logprobs, strict=False)
        for sample, tokens, logprobs in rows:
            count, reason = self._end(sample, tokens)
            # the caches hold all these tokens, those after the sample's end, too
            self.has_nan |= not math.isfinite(sum(logprobs))
            if not math.isfinite(sum(logprobs[:count])):
                raise InputError(
                    "the model's logits are not finite: weights hold NaN or infinity, or are too large"
                )
            whole = count == len(tokens)
            if reason and self.records:
                sample.routes = self.caches.routes(sample.pages, sample.cached + count)
            if not sample.versions or sample.versions[-1][1] != self.version:
                sample.versions.append([len(sample.produced), self.version])
            self.scheduler.decoded(sample, tokens[:count], logprobs[:count], reason, whole)
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

    # --- buffers

    def _allocate(self) -> None:
        settings = self.settings
        # no prefix caching with recurrent layers: only a sequence's last state is kept
        reuse = not self.config.is_recurrent
        size = settings.page_size
        self.page_count = page_count(
            self.cached, settings, self.rows, self.longest, self.page_count, self.records
        )
        pages = Pages(self.page_count, size)
        self.scheduler = Scheduler(
            pages, self.rows, settings.chunk, self.steps, reuse, self.width
        )
        # a slot for each sample that is decoded, and one for a prefill that waits for a row
        self.caches = Caches(
            self.config,
            pages.count,
            size,
            self.rows + 1,
            records=self.records,
            device=self.device,
        )
        if self.drafter:
            self.caches.add_drafts(self.drafter.model.config, self.drafter.layers)
        # columns of a block table: a sample's most pages, and the null page for positions beyond
        self.columns = min(pages.needed(self.longest - 1), pages.count) + 1
        self.graph_pool = self._new_graph_pool()

    def _new_graph_pool(self) -> tuple[int, int] | None:
        """Return memory for CUDA graphs; None where steps cannot be captured."""
        on_cuda = self.device.type == "cuda"
        graphs = on_cuda and not any(waits_for_device(model) for model, _ in self.cached)
        return torch.cuda.graph_pool_handle() if graphs else None

    def _batch(self, samples: int) -> DecodingBatch:
        """Return the buffers for that many rows, rounded up to a power of two."""
        rows = min(1 << (samples - 1).bit_length(), self.rows)
        rows = -(-rows // self.tp) * self.tp
        if rows not in self.batches:
            make = partial(DraftingBatch, self.drafter) if self.drafter else DecodingBatch
            self.batches[rows] = make(
                self.model,
                self.weights,
                self.caches,
                rows,
                columns=self.columns,
                steps=self.steps,
                compiles_blocks=self.compiles,
                compiles_sampling=self.settings.compile,
                graph_pool=self.graph_pool,
            )
        return self.batches[rows]
