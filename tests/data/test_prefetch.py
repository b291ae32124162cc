from __future__ import annotations

import threading
import time

import pytest

from captioning.data.loading import read_ahead


def test_results_come_in_order_however_long_each_takes():
    def slow_at_first(item: int) -> int:
        time.sleep(0.02 / (1 + item))
        return item * item

    assert list(read_ahead(slow_at_first, range(9), threads=3, depth=4)) == [i * i for i in range(9)]


def test_work_goes_on_while_the_reader_is_busy_and_no_further_than_asked():
    done: list[int] = []
    third = threading.Event()

    def work(item: int) -> int:
        done.append(item)
        if item == 2:
            third.set()
        return item

    results = read_ahead(work, range(9), threads=1, depth=2)
    assert next(results) == 0
    assert third.wait(5)  # nothing was asked for since
    time.sleep(0.02)
    assert done == [0, 1, 2]
    assert list(results) == list(range(1, 9))


def test_an_error_is_raised_at_its_turn():
    results = read_ahead(lambda item: 1 // item, [2, 1, 0, 1], threads=2, depth=3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_closing_leaves_no_thread_behind():
    before = threading.active_count()
    results = read_ahead(lambda item: item, range(100), threads=3, depth=5)
    next(results)
    assert threading.active_count() > before
    results.close()
    assert threading.active_count() == before
