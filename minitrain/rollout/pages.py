"""The page allocator of the KV cache: reference counts and prefix caching.

The cache of keys and values is a pool of pages, `size` tokens each, and a sequence has a block
table, the list of its pages (PagedAttention, Kwon et al. 2023). Several sequences may share a page,
which becomes free when the last one frees it. Sharing is safe: only full pages are shared, and a
full page is never written to.

Prefix caching: a full page is found again by its tokens and those of all pages before it. These
keys are compared in full, so that no hash collision can mistake one prompt for another. Cached
pages that nobody uses keep their contents until the pool needs them; the least recently used goes
first. Only numbers here: caches.py has the tensors.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

# the prefix before a sequence's first page
NO_PREFIX = 0


class Pages:
    """An allocator of `count` pages, numbered from 0, of `size` tokens each."""

    def __init__(self, count: int, size: int):
        self.count = count
        self.size = size
        self.ref_count = [0] * count
        # a stack: recently used pages are still in the processor's caches
        self.free_list = list(range(count))[::-1]
        # cached pages that no sequence uses, least recently used first
        self.evictable: OrderedDict[int, None] = OrderedDict()
        # (prefix before the page, its tokens) -> page
        self.page_of: dict[tuple, int] = {}
        # page -> (its key in `page_of`, the prefix that ends with it)
        self.prefix_of: dict[int, tuple[tuple, int]] = {}
        self.last_prefix = NO_PREFIX

    @property
    def available(self) -> int:
        return len(self.free_list) + len(self.evictable)

    def needed(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens`."""
        return -(-tokens // self.size)

    def allocate(self, number: int) -> list[int] | None:
        """Allocate pages with arbitrary contents; return None, and change nothing, if too few."""
        if number > self.available:
            return None
        pages = []
        for _ in range(number):
            if not self.free_list:
                self._evict(next(iter(self.evictable)))
            page = self.free_list.pop()
            self.ref_count[page] = 1
            pages.append(page)
        return pages

    def incref(self, pages: Sequence[int]) -> None:
        """Add one user to each page."""
        for page in pages:
            self.ref_count[page] += 1
            self.evictable.pop(page, None)

    def free(self, pages: Sequence[int]) -> None:
        """Remove one user from each page of a sequence.

        The last page becomes evictable first: without the pages before it, it is never found.
        """
        for page in reversed(pages):
            if self.ref_count[page] < 1:
                raise AssertionError(f"page {page} is freed but has no owner")
            self.ref_count[page] -= 1
            if self.ref_count[page]:
                continue
            if page in self.prefix_of:
                self.evictable[page] = None
            else:
                self.free_list.append(page)

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Return the cached pages that `tokens` begin with, and add one user to each."""
        prefix = NO_PREFIX
        pages = []
        for page_tokens in self._full_pages(tokens):
            page = self.page_of.get((prefix, page_tokens))
            if page is None:
                break
            pages.append(page)
            prefix = self.prefix_of[page][1]
        self.incref(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Cache the full pages of a sequence, whose `pages` hold all of `tokens`."""
        prefix = NO_PREFIX
        for page_tokens, page in zip(self._full_pages(tokens), pages, strict=False):
            key = (prefix, page_tokens)
            if key not in self.page_of:
                # it may still be cached behind a prefix that was evicted, where nobody finds it
                if page in self.prefix_of:
                    del self.page_of[self.prefix_of[page][0]]
                self.last_prefix += 1
                self.page_of[key] = page
                self.prefix_of[page] = key, self.last_prefix
            prefix = self.prefix_of[self.page_of[key]][1]

    def reset(self) -> None:
        """Empty the prefix cache; sequences keep their pages."""
        for page in list(self.prefix_of):
            self._evict(page)

    def _evict(self, page: int) -> None:
        key, _ = self.prefix_of.pop(page)
        del self.page_of[key]
        if page in self.evictable:
            del self.evictable[page]
            self.free_list.append(page)

    def _full_pages(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self.size + 1, self.size):
            yield tuple(tokens[start : start + self.size])
