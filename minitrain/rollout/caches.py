"""The caches of earlier tokens: paged keys and values or latents, or a state per sample.

A module calls its layer's cache in place of attention with a mask. Before each forward pass the
sampler sets `Caches.step`, from which the layers' caches read which token belongs to which sequence.

    PagedKVCache   attention of any kind (kv_cache.py): `attend` writes the new keys and values to the
                   pool and attends to all keys of the sequence. For latent attention the pool holds
                   latents, as keys of one head; their first channels are the values
    RowsCache      the same on the CPU, where decoding steps read row buffers (cpu.py)
    StateCache     Mamba-2 and gated DeltaNet: `mix` runs the module's own scan from each sequence's
                   state, and stores the new state

Pools are allocated when the first keys come, in their type and with this rank's heads.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.layers import rotary_frequencies
from minitrain.models.shapes.mixers import DeltaShape, MambaShape
from minitrain.rollout.cpu import RowContents, RowsCache
from minitrain.rollout.kv_cache import LayerCache, PagedKVCache, join_chunks, zeros
from minitrain.rollout.steps import DecodingStep, PromptStep, on_device

CPU = torch.device("cpu")


class StateCache(LayerCache):
    """The states of a recurrent layer, one per slot.

    states: the convolution's last inputs, [slots, taps - 1, groups, channels], and the scan's
        state, fp32 [slots, groups, *shape.states].
    """

    def __init__(self, caches: "Caches", last: bool, shape: MambaShape | DeltaShape):
        super().__init__(caches, last)
        self.shape = shape
        self.states: list[Tensor] = []
        # (mix, mixed, gates) of a step whose tokens may be rejected
        self.unsettled: tuple | None = None

    def mix(self, mix: Callable, mixed: Tensor, gates: Tensor) -> Tensor:
        """Run mix(mixed, gates, state=), such as `Mamba2.mix`, on the step's tokens.

        mixed, gates: [1, tokens, groups, channels], see the module's `mix`.
        Returns [1, tokens, groups, heads, head_dim].
        """
        step = self.caches.step
        if not self.states:
            slots = self.caches.slots
            conv = (slots, self.shape.conv - 1, *mixed.shape[2:])
            scan = (slots, mixed.shape[2], *self.shape.states)
            self.states = [
                zeros(conv, mixed.dtype, mixed.device),
                zeros(scan, torch.float32, mixed.device),
            ]
        if isinstance(step, DecodingStep):
            # [rows, width, groups, ...]
            mixed = mixed.unflatten(1, (-1, step.width))[0]
            gates = gates.unflatten(1, (-1, step.width))[0]
            starts = step.positions[:: step.width] == 0
            drafts = step.width > 1
            if drafts:
                self.unsettled = mix, mixed, gates
            out = self._run(mix, mixed, gates, step.slots, starts, keep=not drafts)
            return out.flatten(0, 1)[None]
        outs = []
        for chunk in step.chunks:
            # both [1], by one copy to the device
            slot, starts = on_device([[chunk.slot], [chunk.cached == 0]], mixed.device)
            tokens = slice(None), chunk.tokens
            outs.append(self._run(mix, mixed[tokens], gates[tokens], slot, starts.bool()))
        return join_chunks(outs, 1, mixed.shape[1])

    def settle(self, counts: Tensor) -> None:
        """Store the states after the first `counts` [rows] tokens of the step's rows.

        Token by token: their inputs are kept, as states after each of them would take more memory.
        """
        step = self.caches.step
        mix, mixed, gates = self.unsettled
        self.unsettled = None
        positions = step.positions.view(-1, step.width)
        for token in range(step.width):
            slots = step.slots.where(token < counts, self.caches.null_slot)
            one = slice(None), slice(token, token + 1)
            self._run(mix, mixed[one], gates[one], slots, positions[:, token] == 0)

    def _run(
        self,
        mix: Callable,
        mixed: Tensor,
        gates: Tensor,
        slots: Tensor,
        starts: Tensor,
        keep: bool = True,
    ) -> Tensor:
        """Run one sequence per row from the states in `slots`, or from zeros where it `starts`.

        mixed, gates: [rows, tokens, groups, ...]; slots, starts: [rows]. keep: store the new states.
        Returns [rows, tokens, ...].
        """
        current = tuple(
            s[slots].masked_fill_(starts.view(-1, *[1] * (s.ndim - 1)), 0) for s in self.states
        )
        # replaces the contents of `current` by the states after the last token
        out = mix(mixed, gates, state=current)
        for state, new in zip(self.states, current, strict=True) if keep else ():
            state[slots] = new
        return out


class Caches:
    """All layers' caches.

    pages, slots: how many sequences can use. One more of each, the last, is the null page and the
        null slot: padding writes there, and nothing reads them.
    layers: numbers of those that have caches; by default all.
    records: keep the experts that routers select, beside the keys and values.
    step: the forward pass that runs, set by who begins it; None before the first.
    drafts: the caches of what drafts (drafting.py), in the same pages, slots and rows.
    rows: on the CPU, what all layers' row buffers hold.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pages: int,
        page_size: int,
        slots: int,
        layers: range | None = None,
        records: bool = False,
        device: torch.device = CPU,
    ):
        self.records = records
        self.device = device
        self.null_page = pages
        self.null_slot = slots
        self.pages = pages + 1
        self.page_size = page_size
        self.slots = slots + 1
        self.step: PromptStep | DecodingStep | None = None
        self.rows = RowContents(page_size, windowed=bool(config.sliding_window))
        self.computed_frequencies: dict[str, Tensor] = {}
        self.numbers = range(config.num_layers) if layers is None else layers
        self.layers = [self._layer(config, layer) for layer in self.numbers]
        self.drafts: Caches | None = None

    def add_drafts(self, config: DecoderConfig, layers: range) -> None:
        """Make `drafts` for the layers of another model, or for this one's MTP layer."""
        if layers.start and self.layers[-1]:
            # these read its output, also of a prompt's tokens
            self.layers[-1].last = False
        sizes = self.null_page, self.page_size, self.null_slot
        self.drafts = Caches(config, *sizes, layers, device=self.device)
        self.rows.windowed |= self.drafts.rows.windowed
        self.drafts.rows = self.rows

    def _layer(self, config: DecoderConfig, layer: int) -> LayerCache | None:
        mixer = config.parts(layer)[0]
        last = layer == self.numbers[-1]
        if mixer == "attention":
            window = config.sliding_window if config.windowed(layer) else None
            kind = PagedKVCache if self.device.type == "cuda" else RowsCache
            return kind(self, last, window)
        if shape := config.recurrence(layer):
            return StateCache(self, last, shape)
        return LayerCache(self, last) if self.records else None

    def routes(self, pages: list[int], count: int) -> np.ndarray:
        """Return the recorded experts of a sequence's first tokens, int16 [count, layers x top_k]."""
        layers = [layer.routes[0] for layer in self.layers if layer is not None and layer.routes]
        index = on_device(pages[: -(-count // self.page_size)], layers[0].device)
        # [tokens, top_k] each
        parts = [routes[index].flatten(0, 1)[:count] for routes in layers]
        return torch.cat(parts, -1).cpu().numpy()

    def __getitem__(self, layer: int) -> LayerCache | None:
        return self.layers[layer - self.numbers[0]]

    def frequencies(self, *arguments) -> Tensor:
        """Return `rotary_frequencies`, fp32 [dim / 2], computed once: saves up to 15 kernels."""
        # a dict among them has no hash
        key = str(arguments)
        if key not in self.computed_frequencies:
            self.computed_frequencies[key] = rotary_frequencies(*arguments)
        return self.computed_frequencies[key]

    def copy(
        self, pages: list[tuple[int, int]], slots: list[tuple[int, int]], device: torch.device
    ) -> None:
        """Copy pages and states, each (from, to), in all layers."""
        pairs = {"pools": pages, "routes": pages, "states": slots}
        layers = self.layers + (self.drafts.layers if self.drafts else [])
        for name, copies in pairs.items():
            # a layer has some of these, or no cache at all
            tensors = [x for layer in layers for x in getattr(layer, name, [])]
            if copies and tensors:
                source, target = on_device(copies, device).unbind(1)
                for tensor in tensors:
                    tensor[target] = tensor[source]

    def settle(self, counts: Tensor) -> None:
        """Keep the states after the first `counts` [rows] tokens of each row of the step."""
        for layer in self.layers:
            if isinstance(layer, StateCache):
                layer.settle(counts)

    def refresh(self) -> bool:
        """Drop constants computed from the weights. Return whether there were any."""
        # the pages may be computed anew, with the same tokens
        self.rows.held = {}
        layers = [layer for layer in self.layers if layer is not None]
        stale = any(layer.constants is not None for layer in layers)
        for layer in layers:
            layer.constants = None
        if self.drafts is not None:
            stale |= self.drafts.refresh()
        return stale
