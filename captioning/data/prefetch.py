"""Work done ahead in threads, for what waits on memory and disk and leaves Python to others meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, depth: int
) -> Iterator[Result]:
    """Yield ``function(item)`` of every item in order; up to ``depth`` of them are under way or waiting to be taken.

    An error is raised where its item's turn comes. Closing the iterator waits for what is under way.
    """
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read_ahead")
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
