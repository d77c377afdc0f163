"""Which pages of the cache are whose: reference counts, and full pages found again by what they
hold.

The cache of keys and values is a pool of pages, `size` tokens each, and a sequence has a list of
them (PagedAttention, Kwon et al. 2023). Several sequences may have the same page; it is free again
when the last lets go of it. The rule that makes sharing safe: only a page that one sequence alone
has is written to, and only behind the tokens that it holds.

Prefix caching: a full page can be published under its tokens and those of all pages before it, a
chain of keys that are compared in full, so that no hash can mistake one prompt for another.
Published pages without an owner keep their contents until the pool has no other page left; the
longest unused goes first. Only numbers here: caches.py has the tensors.
"""

from collections import OrderedDict
from collections.abc import Sequence

# the chain before a sequence's first page
ROOT = 0


class Pages:
    """`count` pages, numbered from 0, of `size` tokens each."""

    def __init__(self, count: int, size: int):
        self.count = count
        self.size = size
        self.owners = [0] * count
        # a stack: pages that were used lately are warm in some cache
        self.unused = list(range(count))[::-1]
        # published and without an owner, longest unused first
        self.idle: OrderedDict[int, None] = OrderedDict()
        # (chain before the page, its tokens) -> page
        self.published: dict[tuple, int] = {}
        # page -> (its key above, the chain that ends with it)
        self.chains: dict[int, tuple[tuple, int]] = {}
        self.last_chain = ROOT

    @property
    def available(self) -> int:
        return len(self.unused) + len(self.idle)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, number: int) -> list[int] | None:
        """So many pages for one owner, with arbitrary contents; None, and nothing taken, if there
        are fewer.
        """
        if number > self.available:
            return None
        taken = []
        for _ in range(number):
            if not self.unused:
                self._forget(next(iter(self.idle)))
            taken.append(self.unused.pop())
            self.owners[taken[-1]] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for each."""
        for page in pages:
            self.owners[page] += 1
            self.idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One owner less for each of a sequence's pages; later ones are reused before those they
        build on.
        """
        for page in reversed(pages):
            if self.owners[page] < 1:
                raise AssertionError(f"page {page} is released but has no owner")
            self.owners[page] -= 1
            if self.owners[page]:
                continue
            if page in self.chains:
                self.idle[page] = None
            else:
                self.unused.append(page)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The published pages that `tokens` begins with, with an owner more each."""
        chain = ROOT
        found = []
        for key_tokens in self._full_pages(tokens):
            page = self.published.get((chain, key_tokens))
            if page is None:
                break
            found.append(page)
            chain = self.chains[page][1]
        self.share(found)
        return found

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Let others find the full pages of a sequence, whose `pages` hold all of `tokens`."""
        chain = ROOT
        for key_tokens, page in zip(self._full_pages(tokens), pages, strict=False):
            key = (chain, key_tokens)
            if key not in self.published:
                # published on a chain whose beginning is gone
                if page in self.chains:
                    del self.published[self.chains[page][0]]
                self.last_chain += 1
                self.published[key], self.chains[page] = page, (key, self.last_chain)
            chain = self.chains[self.published[key]][1]

    def forget(self) -> None:
        """Nothing that is published is valid any more."""
        for page in list(self.chains):
            self._forget(page)

    def _forget(self, page: int) -> None:
        key, _ = self.chains.pop(page)
        del self.published[key]
        if page in self.idle:
            del self.idle[page]
            self.unused.append(page)

    def _full_pages(self, tokens: Sequence[int]):
        for start in range(0, len(tokens) - self.size + 1, self.size):
            yield tuple(tokens[start : start + self.size])
