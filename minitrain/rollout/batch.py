"""The buffers of a decoding step for a fixed number of rows, and on CUDA the graphs over them."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import numpy as np
import torch
from torch import Tensor

from minitrain.models.decoder import Decoder
from minitrain.rollout.caches import Caches
from minitrain.rollout.sampling import (
    SamplingParams,
    SamplingState,
    compiled_sample_tokens,
    sample_tokens,
)
from minitrain.rollout.scheduler import Sample
from minitrain.rollout.steps import DecodingStep
from minitrain.rollout.weights import SamplerWeights
from minitrain.training.loss import VocabShard, vocab_shard

# the settings of padding rows
PADDING_PARAMS = SamplingParams()


class DecodingBatch:
    """The buffers in which `model` decodes up to `rows` samples, one row each.

    columns: of a block table, as many as the pages of a sample and the null page.
    steps: the most decoding steps in one schedule.
    compiles_blocks: compile them, where that pays. compiles_sampling: compile the choice of tokens.
    graph_pool: the memory of CUDA graphs, as which steps are captured; None: they are not.
    width: tokens of each row that a step computes; more than one are drafts (drafting.py).
    """

    def __init__(
        self,
        model: Decoder,
        weights: SamplerWeights,
        caches: Caches,
        rows: int,
        columns: int,
        steps: int,
        compiles_blocks: bool = False,
        compiles_sampling: bool = False,
        graph_pool: tuple[int, int] | None = None,
        width: int = 1,
    ):
        self.model = model
        self.weights = weights
        self.caches = caches
        self.rows = rows
        self.device = device = model.head_weight.device
        self.graph_pool = graph_pool
        # on CUDA without graphs, launching the compiled parts would cost what they save
        self.compiles = compiles_blocks and (graph_pool is not None or device.type == "cpu")
        self.compiles_sampling = compiles_sampling

        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(rows * width)
        self.positions = zeros(rows * width)
        # the number of the step in its schedule: where in `new_tokens` it writes
        self.step_index = zeros(1)
        # samples that have ended run on until the schedule ends: their positions stop here
        positions = min(columns * caches.page_size, model.config.max_position_embeddings)
        self.last_position = positions - 1
        block_table = zeros(rows, columns)
        slots = zeros(rows)
        self.step = DecodingStep(
            self.positions, block_table, slots, caches.page_size, caches.pages
        )
        # keys and top_k, then temperature, top_p and min_p, of each token
        keys = zeros(rows * width, dtype=torch.int32)
        real = [zeros(rows * width, dtype=torch.float32) for _ in range(3)]
        self.state = SamplingState(keys, zeros(rows * width), *real)
        self.new_tokens = zeros(steps, rows * width)
        self.new_logprobs = zeros(steps, rows * width, dtype=torch.float32)
        # (sample, slot, pages) of each row, as loaded last
        self.loaded: list[tuple] = []
        # (greedy, noisy, filtered) of SamplingState -> graph
        self.captured: dict[tuple[bool, ...], torch.cuda.CUDAGraph] = {}

    def prepare(self, samples: list[Sample], steps: int) -> None:
        """Fill the buffers for `steps` decoding steps of `samples`; the other rows are padding."""
        padding = Sample([0], PADDING_PARAMS, 0, 0, slot=self.caches.null_slot)
        rows = samples + [padding] * (self.rows - len(samples))
        width = self.step.width
        # a sample's newest token: its keys and values are not cached yet
        copy_in(self.tokens, [token for row in rows for token in row.newest(width)])
        positions = [row.cached + i for row in rows for i in range(width)]
        copy_in(self.positions, [min(position, self.last_position) for position in positions])
        self.step_index.zero_()
        held = [(sample, sample.slot, list(sample.pages)) for sample in samples]
        # most steps change nothing else
        if held != self.loaded:
            self.loaded = held
            self._load_rows(rows)
        if self.device.type == "cpu":
            self.step.rows = self.caches.rows.prepare(samples, self.rows, steps, width)

    def _load_rows(self, rows: list[Sample]) -> None:
        table = np.full(self.step.block_table.shape, self.caches.null_page)
        for pages, row in zip(table, rows, strict=True):
            pages[: len(row.pages)] = row.pages
        copy_in(self.step.block_table, table)
        copy_in(self.step.slots, [row.slot for row in rows])
        state = self.state
        # the sample of each token
        owners = [row for row in rows for _ in range(self.step.width)]
        copy_in(state.keys, [owner.key for owner in owners])
        for name in ("temperature", "top_k", "top_p", "min_p"):
            copy_in(getattr(state, name), [getattr(owner.params, name) for owner in owners])
        params = [sample.params for sample, *_ in self.loaded]
        state.greedy = any(p.temperature == 0 for p in params)
        state.noisy = any(p.temperature > 0 for p in params)
        state.filtered = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params)

    def run(self, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Run `steps` decoding steps; return each row's tokens and log-probabilities.

        The host waits for the device only at the end.
        """
        for _ in range(steps):
            if self.graph_pool is not None:
                self._graph().replay()
                continue
            self.decode()
            if self.step.rows is not None:
                self.step.rows = self.step.rows.after_a_step(self.step.width)
        return self.results(steps)

    def results(self, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return each row's tokens and log-probabilities of the last steps."""
        return self.new_tokens[:steps].T.tolist(), self.new_logprobs[:steps].T.tolist()

    def decode(self) -> None:
        """Run one step: the forward pass, whose head samples the next tokens."""
        self.step.begin()
        self.caches.step = self.step
        with self.compiled() if self.compiles else nullcontext():
            self.model(
                self.tokens[None],
                positions=self.positions[None],
                head=self.sample,
                cache=self.caches,
            )

    def compiled(self) -> AbstractContextManager:
        """Run the blocks of a step compiled."""
        return compiled_blocks(self.model)

    def sample(self, hidden: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """Sample the next tokens from hidden [1, tokens, hidden]; record and feed them back.

        weight: the head's, [vocab, hidden] or a DTensor split by vocabulary. Returns `hidden`.
        """
        # both [tokens]; the new tokens follow the positions of this step
        tokens, logprobs, shard = self.choose(
            self.weights, hidden[0], weight, self.state, self.positions + 1
        )
        tokens = self.feed(tokens, hidden, shard)
        # [steps, tokens]; the index is a tensor, so that a graph can replay this
        self.new_tokens.index_copy_(0, self.step_index, tokens[None])
        self.new_logprobs.index_copy_(0, self.step_index, logprobs[None])
        self.step_index.add_(1)
        # the model returns it; nothing reads it
        return hidden

    def choose(
        self,
        weights: SamplerWeights,
        hidden: Tensor,
        weight: Tensor,
        state: SamplingState,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor, VocabShard]:
        """Sample tokens at `positions` [rows] from hidden [rows, hidden], as `sample_tokens` does.

        weight: the head's of `weights`. Returns also how it is split.
        """
        weight, shard = vocab_shard(weight)
        # [rows, vocab, or this rank's shard of it]
        logits = weights.multiply_head(hidden, weight)
        # torch 2.11's compiler fails on several filtered rows
        compiles = self.compiles_sampling and shard.group is None and not state.filtered
        sampled = compiled_sample_tokens() if compiles else sample_tokens
        return *sampled(logits, state, positions, shard), shard

    def feed(self, tokens: Tensor, hidden: Tensor, shard: VocabShard) -> Tensor:
        """Feed the new tokens [rows] to the next step, and return them."""
        self.tokens.copy_(tokens)
        self.positions.add_(1).clamp_(max=self.last_position)
        return tokens

    def drop_graphs(self, graph_pool: tuple[int, int] | None) -> None:
        """Drop the captured graphs; later ones use the memory of another pool."""
        self.captured.clear()
        if self.graph_pool is not None:
            self.graph_pool = graph_pool

    def _graph(self) -> torch.cuda.CUDAGraph:
        """Return the step as a CUDA graph for the rows' way of sampling; captured at first use.

        Capturing runs nothing, but the warm-up before it does: its changes are undone.
        """
        kind = self.state.greedy, self.state.noisy, self.state.filtered
        if kind not in self.captured:
            table = self.step.block_table
            changed = [self.tokens, self.positions, self.step_index, table, self.step.slots]
            before = [tensor.clone() for tensor in changed]
            # the warm-up writes to the null page and the null slot, so no sample changes
            table.fill_(self.caches.null_page)
            self.step.slots.fill_(self.caches.null_slot)
            stream = warmup_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # compile, and let libraries allocate what they need
                for _ in range(2):
                    self.step_index.zero_()
                    self.decode()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # of this thread alone: NCCL's watchdog, or a checkpoint's writer, may query an event
            with torch.cuda.graph(graph, pool=self.graph_pool, capture_error_mode="thread_local"):
                self.decode()
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            self.captured[kind] = graph
        return self.captured[kind]


def compiled_blocks(*models: Decoder) -> AbstractContextManager:
    """Run the blocks of models compiled."""
    from minitrain.rollout.compiled import compiled  # takes seconds to import

    # a model may draft for itself
    return compiled([block for model in dict.fromkeys(models) for block in model.blocks])


@cache
def warmup_stream() -> torch.cuda.Stream:
    """Return one stream for all warm-ups: torch keeps 32 MB of cuBLAS workspace for each stream."""
    return torch.cuda.Stream()


def copy_in(target: Tensor, numbers: list | np.ndarray) -> None:
    """Copy the host's numbers, [rows] or [rows, columns], into a buffer of the same shape.

    The host does not wait for the device.
    """
    source = torch.as_tensor(numbers, dtype=target.dtype)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
