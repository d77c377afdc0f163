"""The sampler: continues many prompts at once with a model that stays the trainer's.

    submit    queues the samples of a prompt
    step      does what the scheduler plans: a chunk of prompts, or some decoding steps of all running samples
    generate  submits everything and steps until all is done

A decoding step is one forward pass over one token per row, whose last act is to choose the next
tokens. Rows are filled up to a few fixed numbers (1, 2, 4, ...), and everything that changes
between steps is in buffers that stay where they
are: so on CUDA the step is captured as a graph once per number of rows, and replayed `steps` times
before the host looks at what was produced. Samples that ended in between have produced too much,
which is thrown away.

Tensor parallel: every rank of the group calls the same methods in the same order; schedules are
equal by construction, tokens because all see the same candidates. A row is padded to a multiple of
the ranks, as sequence parallelism wants. With expert parallelism over the same ranks, tokens travel
to the experts and back. Left out: pipeline parallel, speculative decoding, and graphs of steps in
which the host must wait for the device (`waits_for_device`).
"""

import gc
import math
import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DecoderConfig, find_ends
from minitrain.rollout.batch import Batch
from minitrain.rollout.caches import Caches, Chunk, PromptStep, on_device
from minitrain.rollout.pages import Pages
from minitrain.rollout.sampling import Completion, SamplingParams, sample_key
from minitrain.rollout.scheduler import Prefill, Sample, Scheduler, Work
from minitrain.rollout.weights import Weights
from minitrain.settings import Rollout
from minitrain.training.footprint import free_memory

# elements of a pool: for more, FlexAttention's kernel for decoding does not compile
INDEXED = 2**31 - 1


class Sampler:
    """`generate` continues prompts with `model`, whose weights it uses in place.

    tokenizer: for prompts that are text, for stop strings, and for its own end of a text besides
    the model's.
    samples: how many it will be asked for at once, and longest: the tokens of the longest with its
    prompt, if that is
    known: it takes no memory for more.
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
        self.weights = Weights(model)
        self.ends = find_ends(model.config, tokenizer.eos_id if tokenizer else None)
        self.longest = min(
            longest or self.config.max_position_embeddings, self.config.max_position_embeddings
        )
        # with FSDP or expert parallelism the host's work differs from step to step, and no graph
        # could be used again
        self.compiles = self.settings.compile and not (
            isinstance(model, FSDPModule) or sends_tokens(model)
        )
        self.device = model.head_weight.device
        if self.device.type == "cuda":
            check_page_size(self.settings.page_size, self.config, model.sequence_split)
        steps = self.settings.steps or (16 if self.device.type == "cuda" else 1)
        # there are buffers for so many
        self.steps = min(steps, self.longest)
        self.scheduler: Scheduler | None = None
        # of the pool, from when it is first allocated
        self.page_count = 0
        # do caches hold NaN or infinity? Times a weight of 0 that would reach other samples
        self.spoiled = False

    # ------------------------------------------------------------------------------------------------------ requests

    @torch.inference_mode(False)
    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Completion]:
        """Return the samples of all prompts in order: prompt 0's n samples, prompt 1's, ...

        prompts: token ids of each, or text, which the tokenizer encodes as a prompt.
        params: for all prompts, which then draw different random numbers by their place in the
        list; or for each, whose randomness comes from its own seed alone. Raises InputError for
        what the model or the pool cannot hold.
        """
        alike = isinstance(params, SamplingParams)
        if isinstance(prompts, str):
            raise InputError("prompts must be a list, of texts or of lists of token ids")
        each = [params] * len(prompts) if alike else params
        if len(each) != len(prompts):
            raise InputError(
                f"{len(prompts)} prompts and {len(each)} SamplingParams: give one, or one per prompt"
            )
        samples = []
        try:
            for number, pair in enumerate(zip(prompts, each, strict=True)):
                samples += self.submit(*pair, number=number if alike else 0)
            with self.weights.in_use():
                while self.busy:
                    self.step()
        except BaseException:
            # an interrupt too must leave nothing queued
            self.cancel(*samples)
            raise
        return [
            Completion(sample.produced, sample.logprobs, sample.finish_reason) for sample in samples
        ]

    @torch.inference_mode(False)
    def submit(
        self, prompt: Sequence[int] | str, params: SamplingParams, number: int = 0
    ) -> list[Sample]:
        """Queue a prompt; its n samples fill up (`produced`, `logprobs`, `finish_reason`) as `step`
        is called.

        number: of the request; with params.seed, what its random numbers come from.
        """
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
        if self.spoiled and not self.busy:
            self.free()
        if self.scheduler is None:
            self._allocate()
        total = min(len(prompt) + params.max_tokens, limit)
        keys = (sample_key(params.seed, number, i) for i in range(params.n))
        samples = [Sample(prompt, params, key, total) for key in keys]
        self.scheduler.submit(samples)
        return samples

    def tokens_of(self, prompt: Sequence[int] | str) -> list[int]:
        """Return the ids of a prompt. Raises InputError for what is neither text nor a list of
        ids.
        """
        if not isinstance(prompt, str):
            try:
                return list(map(operator.index, prompt))
            except TypeError:
                raise InputError(
                    f"a prompt is {prompt!r:.60}: give a list of token ids, or text"
                ) from None
        if self.tokenizer is None:
            raise InputError(
                f"the prompt {prompt!r:.60} is text, which needs a sampler with a tokenizer"
            )
        return self.tokenizer.encode_prompt(prompt)

    # what is kept between steps could not be changed outside that mode
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[tuple[Sample, list[int]]]:
        """Do a piece of the work that there is; returns which samples went on, and by which tokens.

        Whoever takes many steps does so `with sampler.weights.in_use()`, as `generate` does: a step
        alone prepares the model and puts it back. After an interrupt while the model computes,
        steps go on as if there had been none; what the broken one had chosen already stands in the
        samples, but no step returns it.
        """
        with self.weights.in_use():
            work = self.scheduler.plan()
            try:
                self.caches.copy(work.page_copies, work.slot_copies, self.device)
                if work.chunks:
                    self._compute(work.chunks)
                    return []
                return self._decode(work) if work.samples else []
            except BaseException:
                # states may have taken the step's tokens already, and would take them twice
                self.scheduler.restart()
                raise

    def cancel(self, *samples: Sample) -> None:
        """End samples, one or all that `submit` gave, between two steps; they keep what they have
        produced.
        """
        # after `free` all have ended
        if self.scheduler is not None:
            for sample in samples:
                self.scheduler.cancel(sample)

    @property
    def busy(self) -> bool:
        return self.scheduler is not None and self.scheduler.busy

    def refresh(self) -> None:
        """Forget all that was computed with earlier weights. No request may be under way."""
        self.weights.refresh()
        self.forget()
        if self.scheduler is None or not self.caches.refresh():
            return
        for batch in self.batches.values():
            # graphs read what was made of the weights
            batch.captured.clear()
        if self.device.type == "cuda":
            # a handle is dead once all of its graphs are
            self.graph_pool = torch.cuda.graph_pool_handle()

    def forget(self) -> None:
        """Let later requests find nothing of what earlier ones computed. No request may be under
        way.
        """
        self._must_be_idle()
        if self.scheduler is not None:
            self.scheduler.pages.forget()

    def free(self) -> None:
        """Give the memory of the caches back; the next request allocates it again."""
        self._must_be_idle()
        self.weights.refresh()
        self.scheduler = self.caches = self.batches = None
        self.spoiled = False
        if self.device.type == "cuda":
            # the compiler leaves behind cycles that hold what a kernel was first called with
            gc.collect()

    def _must_be_idle(self) -> None:
        if self.busy:
            raise RuntimeError(
                "the sampler has unfinished requests: step until it is not busy, or cancel them"
            )

    # ------------------------------------------------------------------------------------------------------ the work

    def _compute(self, prefills: list[tuple[Prefill, int]]) -> None:
        """Bring the next tokens of some prompts into the caches, so many of each, all in one
        row.
        """
        size = self.settings.page_size
        tokens = []
        positions = []
        places = []
        chunks = []
        for prefill, count in prefills:
            wanted = range(prefill.cached, prefill.cached + count)
            pages = on_device(
                prefill.pages[: self.scheduler.pages.needed(wanted.stop)], self.device
            )
            chunks.append(Chunk(len(tokens), count, prefill.cached, pages, prefill.slot))
            tokens += prefill.tokens[wanted.start : wanted.stop]
            positions += wanted
            places += [(prefill.pages[i // size], i % size) for i in wanted]
        padding = -len(tokens) % self.model.sequence_split
        tokens = tokens + [0] * padding
        positions = positions + [0] * padding
        places += [(self.caches.null_page, 0)] * padding
        self.caches.step = PromptStep(
            on_device([*zip(*places, strict=True)], self.device).unbind(), chunks
        )
        # the next token is chosen in a decoding step: the head does nothing
        self.forward(
            on_device(tokens, self.device),
            on_device(positions, self.device),
            lambda hidden, *_: hidden,
        )
        for prefill, count in prefills:
            self.scheduler.computed(prefill, count)

    def _decode(self, work: Work) -> list[tuple[Sample, list[int]]]:
        """`work.steps` tokens for each sample, of which those after its end are dropped. Raises
        InputError for NaN.
        """
        batch = self._batch(len(work.samples))
        batch.load(work.samples, work.steps)
        batch.run(work.steps)
        news = []
        for sample, tokens, logprobs in zip(
            work.samples, *batch.produced(work.steps), strict=False
        ):
            count, reason = self._end(sample, tokens)
            # also what comes after the sample's end is cached
            self.spoiled |= not math.isfinite(sum(logprobs))
            if not math.isfinite(sum(logprobs[:count])):
                raise InputError(
                    "the model's logits are not finite: weights hold NaN or infinity, or are too large"
                )
            self.scheduler.decoded(sample, tokens[:count], logprobs[:count], reason)
            news.append((sample, tokens[:count]))
        return news

    def _end(self, sample: Sample, tokens: list[int]) -> tuple[int, str | None]:
        """How many of the new tokens count, and why there will be no more."""
        params = sample.params
        ends = params.stop_tokens if params.ignore_eos else (*params.stop_tokens, *self.ends)
        for count, token in enumerate(tokens, 1):
            if token in ends or (params.stop and self._wrote_stop(sample, tokens[:count])):
                return count, "stop"
            if len(sample.prompt) + len(sample.produced) + count == sample.limit:
                return count, "length"
        return len(tokens), None

    def _wrote_stop(self, sample: Sample, tokens: list[int]) -> bool:
        """Does the text now hold a stop string? Looks at its end only: a character is at most four
        tokens.

        The token before that is decoded too: many vocabularies drop a space at the start of a text.
        """
        context, *end = (sample.prompt[-1:] + sample.produced + tokens)[
            -4 * max(map(len, sample.params.stop)) - 5 :
        ]
        for special in (False, True):
            before, text = (
                self.tokenizer.decode(ids, special) for ids in ([context], [context, *end])
            )
            if any(stop in text[len(before) :] for stop in sample.params.stop):
                return True
        return False

    def forward(self, tokens: Tensor, positions: Tensor, head) -> None:
        self.model(tokens[None], positions=positions[None], head=head, cache=self.caches)

    # ------------------------------------------------------------------------------------------------------- buffers

    def _allocate(self) -> None:
        settings = self.settings
        hybrid = "M" in self.config.layer_pattern
        size = settings.page_size
        self.page_count = self._page_count()
        pages = Pages(self.page_count, size)
        self.scheduler = Scheduler(pages, self.slots, settings.chunk, self.steps, reuse=not hybrid)
        # a slot for each sample that is decoded, and one for a prefill that waits
        self.caches = Caches(self.config, pages.count, size, self.slots + 1)
        # of a table of pages; the last is the null page
        self.width = min(pages.needed(self.longest - 1), pages.count) + 1
        self.batches: dict[int, Batch] = {}
        self.graph_pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _batch(self, samples: int) -> Batch:
        """The buffers for so many rows or more: the next power of two."""
        split = self.model.sequence_split
        rows = min(1 << (samples - 1).bit_length(), self.slots)
        rows = -(-rows // split) * split
        if rows not in self.batches:
            self.batches[rows] = Batch(
                self, rows, self.device.type == "cuda" and not waits_for_device(self.model)
            )
        return self.batches[rows]

    def _page_count(self) -> int:
        """rollout.pages; or as many as last time, if they fit, since kernels are compiled for the
        pool's size.

        Else what fits into rollout.memory, a share of the free memory, but no more than all slots
        could fill and one more, the last of a prompt whose samples wait for a slot. Raises
        InputError for more rollout.pages than fit.
        """
        if pages := self.settings.pages:
            if pages > (fitting := self._fitting_pages(1.0)):
                raise InputError(
                    f"rollout.pages={pages} are more than the free memory, or a kernel's index, has room for "
                    f"(use at most {fitting}, or 0)"
                )
            return pages
        if self.page_count and self._fitting_pages(1.0) >= self.page_count:
            return self.page_count
        # no last token is cached
        most = self.slots * -(-(self.longest - 1) // self.settings.page_size) + 1
        return max(1, min(most, self._fitting_pages(self.settings.memory)))

    def _fitting_pages(self, share: float) -> int:
        """How many pages fit into this share of the free memory, on all ranks that step
        together.
        """
        config = self.config
        size = self.settings.page_size
        # latents, which all of a rank's heads read
        if config.kv_lora_rank:
            width = config.kv_lora_rank + config.qk_rope_head_dim
            pools = 1
        else:
            # keys and values of this rank's heads
            width = -(-config.num_key_value_heads // self.model.sequence_split) * config.head_dim
            pools = 2
        layers = sum(config.parts(layer)[0] == "attention" for layer in range(config.num_layers))
        page_bytes = size * width * pools * layers * self.model.head_weight.dtype.itemsize
        fitting = int(share * free_memory(self.device) / max(page_bytes, 1))
        pages = torch.tensor(min(fitting, INDEXED // (size * width) - 1))
        if isinstance(self.model.head_weight, DTensor):
            pages = pages.to(self.device)
            mesh = self.model.head_weight.device_mesh
            for dimension in range(mesh.ndim):
                dist.all_reduce(pages, dist.ReduceOp.MIN, mesh.get_group(dimension))
        return int(pages)


def check_page_size(size: int, config: DecoderConfig, tp: int) -> None:
    """What FlexAttention can read: tiles of 128, and of latents one page for all heads of a rank
    (`PageMask`).
    """
    heads = config.num_attention_heads // tp if config.kv_lora_rank else 1
    if size % 128 or size < heads:
        least = 128 * -(-heads // 128)
        raise InputError(
            f"rollout.page_size={size} must be a multiple of 128 on CUDA, at least {least} for this model"
        )


def waits_for_device(model: Decoder) -> bool:
    """Does each decoding step need something of the host that only the device knows? Then no graph
    can replay it.

    So it is where FSDP gathers layers, where experts are split over ranks (how many tokens arrive),
    and where grouped products do not take torch's fast kernel (bf16, from compute capability 9.0
    on; how many rows each expert has).
    """
    fast = all(
        stack.dtype == torch.bfloat16 and capability(stack) >= (9, 0)
        for stack in expert_stacks(model)
    )
    return isinstance(model, FSDPModule) or sends_tokens(model) or not fast


def sends_tokens(model: Decoder) -> bool:
    """Do tokens travel between ranks, to experts that are split over them?"""
    return any(
        isinstance(stack, DTensor) and stack.placements[-1] == Shard(0)
        for stack in expert_stacks(model)
    )


def expert_stacks(model: Decoder) -> list[Tensor]:
    """Not as attributes: after a forward pass those are plain tensors."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith("experts.down_proj")
    ]


def capability(tensor: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(tensor.device)
