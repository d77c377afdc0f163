"""Hash names and numbered places to random bits, which depend on no generator, order or layout.

The 32-bit mixer "lowbias32" (Wellons, "Prospecting for hash functions", 2018) is a bijection: each
bit of the input changes each of the output with a probability within 0.2 % of one half.
"""

import hashlib

from torch import Tensor

ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))


def seed_of(text: str) -> int:
    """Return a seed of 63 bits for a torch.Generator."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def mix_(x: Tensor) -> Tensor:
    """Hash int32 numbers [...] in place, and return them.

    Shifts of int32 bring in copies of the sign, which are masked off.
    """
    for shift, factor in ROUNDS:
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def mix_int(x: int) -> int:
    """Return the hash of one number, 0 <= x < 2^32, as `mix_` has it."""
    for shift, factor in ROUNDS:
        x = (x ^ x >> shift) * (factor & 0xFFFFFFFF) & 0xFFFFFFFF
    return x ^ x >> 16


def nth(n: int, length: int, seed: int) -> tuple[int, int]:
    """Return the epoch of row n, and which of `length` rows it is.

    Each epoch visits all rows, in another order.
    """
    epoch, index = divmod(int(n), length)
    return epoch, shuffled(index, length, seed, epoch)


def shuffled(index: int, length: int, *key: int) -> int:
    """Return where a random permutation of range(length), chosen by `key`, sends `index`: no table.

    A Feistel network permutes the next power of four; walking on along its cycle until the result
    is below `length` restricts it to a permutation of range(length) (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002).
    """
    half = ((length - 1).bit_length() + 1) // 2
    while True:
        left = index >> half
        right = index % (1 << half)
        for turn in range(8):
            digest = hashlib.blake2b(
                repr((*key, length, turn, right)).encode(), digest_size=8
            ).digest()
            left, right = right, left ^ int.from_bytes(digest, "little") % (1 << half)
        index = left << half | right
        if index < length:
            return index
