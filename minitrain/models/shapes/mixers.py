"""The shapes of mixers that carry a state along the sequence, mamba.py and delta.py."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class MambaShape:
    """The shape of a Mamba-2 mixer, in the letters of mamba.py.

    heads: H, each of head_dim P.
    groups: G, a divisor of H.
    state: N.
    conv: the taps of the convolution.
    chunk: Q, which changes speed and memory only.
    dt_min: the least dt.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    chunk: int
    dt_min: float = 0.0

    @property
    def width(self) -> int:
        """Return the channels of x, of z and of the output: H P."""
        return self.heads * self.head_dim

    @property
    def states(self) -> tuple[int, int, int]:
        """Return the shape of the states of a group's heads."""
        return self.heads // self.groups, self.head_dim, self.state

    @property
    def projected(self) -> list[int]:
        """Return the rows of in_proj: z, x, B, C, dt."""
        return [self.width, *self.convolved, self.heads]

    @property
    def convolved(self) -> list[int]:
        """Return the channels of the convolution: x, B, C."""
        return [self.width, self.groups * self.state, self.groups * self.state]


@dataclass(frozen=True)
class DeltaShape:
    """The shape of a gated DeltaNet, in the letters of delta.py.

    groups: G, heads of keys and queries, each of key_dim K.
    heads: heads of values, a multiple of G, each of head_dim P.
    conv: the taps of the convolution.
    fused: two projections, of [q k v z] and [b a], not four, of [q k v], z, b and a.
    """

    groups: int
    key_dim: int
    heads: int
    head_dim: int
    conv: int
    fused: bool = False

    @property
    def width(self) -> int:
        """Return the channels of v, of z and of the output."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> list[int]:
        """Return the channels of the convolution: q, k, v."""
        return [self.groups * self.key_dim, self.groups * self.key_dim, self.width]

    @property
    def states(self) -> tuple[int, int, int]:
        """Return the shape of the states of a group's heads."""
        return self.heads // self.groups, self.key_dim, self.head_dim


def state_bytes(shape: MambaShape | DeltaShape, itemsize: int) -> int:
    """Return the bytes of a sequence's states in a layer: the scan's in fp32, and the convolution's.

    itemsize: bytes per element of the convolution's inputs.
    """
    return 4 * state_elements(shape) + itemsize * (shape.conv - 1) * sum(shape.convolved)


def state_elements(shape: MambaShape | DeltaShape) -> int:
    """Return the number of elements of the states of all heads of a layer."""
    return shape.groups * math.prod(shape.states)
