"""Pages of the cache: who holds them, which are free."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """`num_pages` reference-counted pages, numbered from 0."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each; None, and nothing taken, if there are not so many."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page in use."""
        self._check_in_use(page)
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One holder fewer; the last one frees the page."""
        self._check_in_use(page)
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)

    def _check_in_use(self, page: int) -> None:
        if not 0 <= page < self.num_pages or not self._references[page]:
            raise ValueError(f"page {page} is not in use (pool of {self.num_pages})")
