"""The buffers of a decoding step for a fixed number of rows, and on CUDA the graphs over them."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import torch
from torch import Tensor

from minitrain.rollout.caches import DecodingStep, Held
from minitrain.rollout.sampling import Choice, choose, compiled_choose
from minitrain.rollout.scheduler import Sample
from minitrain.training.loss import vocab_shard

# tokens that a group must save from being read again: with fewer it costs more than it saves
WORTH = 512
# the settings of rows without a sample
PADDING = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


class Batch:
    """The buffers in which `sampler` decodes up to `rows` samples. graphs: are its steps captured
    as CUDA graphs?
    """

    def __init__(self, sampler, rows: int, graphs: bool):
        self.sampler = sampler
        self.rows = rows
        self.graphs = graphs
        device = sampler.device
        caches = sampler.caches
        # on CUDA without graphs the compiled parts' own calls would cost what they save
        self.compiles = sampler.compiles and (graphs or device.type == "cpu")

        def numbers(*shape, dtype=torch.int64):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = numbers(rows)
        self.positions = numbers(rows)
        self.turn = numbers(1)
        self.last_position = (
            min(sampler.width * caches.page_size, sampler.config.max_position_embeddings) - 1
        )
        table = numbers(rows, sampler.width)
        slots = numbers(rows)
        self.step = DecodingStep(self.positions, table, slots, caches.page_size, caches.pages)
        real = {
            name: numbers(rows, dtype=torch.float32) for name in ("temperature", "top_p", "min_p")
        }
        self.choice = Choice(keys=numbers(rows, dtype=torch.int32), top_k=numbers(rows), **real)
        self.new_tokens = numbers(sampler.steps, rows)
        self.new_logprobs = numbers(sampler.steps, rows, dtype=torch.float32)
        # (sample, slot, pages) of each row, as they were loaded last
        self.places: list[tuple] = []
        self.captured: dict[tuple[bool, ...], torch.cuda.CUDAGraph] = {}

    def load(self, samples: list[Sample], steps: int) -> None:
        """Fill the buffers for `samples`; the other rows are padding."""
        padding = self.rows - len(samples)
        put(
            self.tokens,
            [(sample.produced or sample.prompt)[-1] for sample in samples] + [0] * padding,
        )
        put(self.positions, [sample.cached for sample in samples] + [0] * padding)
        self.turn.zero_()
        places = [(sample, sample.slot, list(sample.pages)) for sample in samples]
        # most steps change nothing else
        if places != self.places:
            self.places = places
            self._load_places(samples, padding)
        if self.sampler.device.type == "cpu":
            self._load_rows(samples, steps)

    def _load_places(self, samples: list[Sample], padding: int) -> None:
        caches = self.sampler.caches
        table = np.full(self.step.table.shape, caches.null_page)
        for row, sample in zip(table, samples, strict=False):
            row[: len(sample.pages)] = sample.pages
        put(self.step.table, table)
        put(self.step.slots, [sample.slot for sample in samples] + [caches.null_slot] * padding)
        put(self.choice.keys, [sample.key for sample in samples] + [0] * padding)
        for name, value in PADDING.items():
            put(
                getattr(self.choice, name),
                [getattr(s.params, name) for s in samples] + [value] * padding,
            )
        self.choice.greedy = any(sample.params.temperature == 0 for sample in samples)
        self.choice.noisy = any(sample.params.temperature > 0 for sample in samples)
        self.choice.filtered = any(
            s.params.top_k > 0 or s.params.top_p < 1 or s.params.min_p > 0 for s in samples
        )

    def _load_rows(self, samples: list[Sample], steps: int) -> None:
        """For the CPU's buffers: which samples share a prefix, and what their rows must gather
        again.
        """
        caches = self.sampler.caches
        step = self.step
        pages = self.sampler.scheduler.pages
        step.longest = max(sample.cached for sample in samples) + 1
        height, width = caches.buffer_shape
        if self.rows > height or step.longest + steps > width:
            caches.buffer_shape = max(height, self.rows), max(width, 2 * (step.longest + steps))
            caches.rows_held = {}
        step.shared, groups = shared_prefixes(samples, pages.size)
        step.groups = [(group[0], index_of(group)) for group in groups]
        # only these hold what their group shares
        prefix_rows = {group[0] for group in groups}
        # from and to which token a row lacks all, and which rows do
        spans: dict[tuple[int, int], list[int]] = {}
        for row, sample in enumerate(samples):
            begin = 0 if row in prefix_rows or self.sampler.config.sliding_window else step.shared
            held = caches.rows_held.get(row)
            if (
                held is None
                or (held.sample, held.end) != (sample, sample.cached)
                or held.begin > begin
            ):
                held = Held(sample, begin, sample.cached)
                if begin < sample.cached:
                    spans.setdefault((begin, sample.cached), []).append(row)
            caches.rows_held[row] = held._replace(end=sample.cached + steps)
        for row in range(len(samples), self.rows):
            # padding rows write there
            caches.rows_held.pop(row, None)
        step.gathered = []
        for (begin, end), rows in spans.items():
            lists = [samples[row].pages[begin // pages.size : pages.needed(end)] for row in rows]
            step.gathered.append((torch.tensor(rows), torch.tensor(lists), begin, end))

    def run(self, steps: int) -> None:
        """So many decoding steps, without a look at the results."""
        for _ in range(steps):
            if self.graphs:
                self._graph().replay()
            else:
                self.decode()
                self.step.gathered = []
                self.step.longest += 1

    def decode(self) -> None:
        """One step, on the device alone."""
        self.step.begin()
        self.sampler.caches.step = self.step
        with self.sampler.weights.compiled() if self.compiles else nullcontext():
            self.sampler.forward(self.tokens, self.positions, self.head)

    def head(self, hidden: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """Choose the next tokens from [1, rows, hidden], write them down, and make them the next
        step's.
        """
        weight, part = vocab_shard(weight)
        [logits] = self.sampler.weights.products(
            self.sampler.model, hidden[0], lambda: [(weight, None)]
        )
        # of several rows that are filtered, torch 2.11's compiler fails to make a kernel
        compiled = self.sampler.settings.compile and part.group is None and not self.choice.filtered
        tokens, logprobs = (compiled_choose() if compiled else choose)(
            logits, self.choice, self.positions + 1, part
        )
        self.new_tokens.index_copy_(0, self.turn, tokens[None])
        self.new_logprobs.index_copy_(0, self.turn, logprobs[None])
        self.tokens.copy_(tokens)
        self.positions.add_(1).clamp_(max=self.last_position)
        self.turn.add_(1)
        return hidden

    def produced(self, steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Each row's tokens and log-probabilities. Waits for the device."""
        return self.new_tokens[:steps].T.tolist(), self.new_logprobs[:steps].T.tolist()

    def _graph(self) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph, for the way of choosing that the rows need; captured at first
        use.

        Capturing runs nothing, but the warm-up before it does: what that changes is put back.
        """
        kind = self.choice.greedy, self.choice.noisy, self.choice.filtered
        if kind not in self.captured:
            changed = [self.tokens, self.positions, self.turn, self.step.table, self.step.slots]
            before = [tensor.clone() for tensor in changed]
            # so that no sample's pages or states change
            self.step.table.fill_(self.sampler.caches.null_page)
            self.step.slots.fill_(self.sampler.caches.null_slot)
            stream = warmup_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # compile, and let libraries allocate what they need
                for _ in range(2):
                    self.turn.zero_()
                    self.decode()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.sampler.graph_pool):
                self.decode()
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            self.captured[kind] = graph
        return self.captured[kind]


@cache
def warmup_stream() -> torch.cuda.Stream:
    """One for all: torch keeps cuBLAS' workspace, 32 MB, of every stream that has multiplied
    anything.
    """
    return torch.cuda.Stream()


def shared_prefixes(samples: list[Sample], page_size: int) -> tuple[int, list[list[int]]]:
    """The number of tokens that the samples of every group share, and each group's rows.

    A group is the samples of one prompt. (0, []) where reading the shared tokens once is not worth
    it.
    """
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.pages[0], []).append(row)
    if len(groups) == len(samples):
        return 0, []
    shared = page_size * min(
        common_pages([samples[row] for row in rows], page_size) for rows in groups.values()
    )
    return (
        (shared, list(groups.values()))
        if shared * (len(samples) - len(groups)) >= WORTH * len(groups)
        else (0, [])
    )


def index_of(rows: list[int]) -> slice | Tensor:
    """What picks these rows, which ascend, out of a tensor: without a copy where none is left
    out.
    """
    return (
        slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else torch.tensor(rows)
    )


def common_pages(samples: list[Sample], page_size: int) -> int:
    """How many full pages the samples begin with alike."""
    first = samples[0].pages
    full = min(sample.cached for sample in samples) // page_size
    different = (
        i for i in range(full) if any(sample.pages[i] != first[i] for sample in samples[1:])
    )
    return next(different, full)


def put(target: Tensor, numbers: list | np.ndarray) -> None:
    """Copy numbers of the host into a buffer, without waiting for the device."""
    source = torch.as_tensor(numbers, dtype=target.dtype)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
