# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory made by a thread: nothing is made twice, lost or kept."""

import threading

import pytest

from vllm.model_executor.layers.fused_moe.pinned_hot import made_ahead
from vllm.model_executor.layers.fused_moe.pinned_hot.made_ahead import MadeAhead


class Driver:
    """Makes numbered pieces, waits when told to, and knows what is alive."""

    def __init__(self, fail_at=None):
        self.sizes = []
        self.alive = set()
        self.threads = set()
        self.fail_at = fail_at
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Semaphore(0)

    def create(self, size):
        self.began.release()
        assert self.go.wait(10)
        if len(self.sizes) == self.fail_at:
            raise MemoryError(f"no {size} bytes")
        self.threads.add(threading.current_thread().name)
        piece = (size, len(self.sizes))
        self.sizes.append(size)
        self.alive.add(piece)
        return piece

    def release(self, piece):
        self.alive.remove(piece)


def ahead(driver, sizes):
    return MadeAhead(sizes, driver.create, driver.release)


def wait_until_made(driver, count):
    for _ in range(count):
        assert driver.began.acquire(timeout=10)


def test_pieces_are_made_in_order_by_the_thread():
    driver = Driver()
    sizes = [3, 1, 3, 2, 1]
    made = ahead(driver, sizes)
    wait_until_made(driver, len(sizes))
    assert sorted(made.take(size) for size in sizes) == sorted(driver.alive)
    assert driver.sizes == sizes and driver.threads == {"made-ahead"}
    made.close()
    assert len(driver.alive) == len(sizes)  # those that were taken


def test_piece_that_is_being_made_is_waited_for():
    driver = Driver()
    driver.go.clear()
    made = ahead(driver, [5])
    wait_until_made(driver, 1)
    threading.Timer(0.05, driver.go.set).start()
    assert made.take(5) == (5, 0)
    assert driver.sizes == [5] and driver.threads == {"made-ahead"}


def test_piece_that_is_waited_for_is_made_by_whoever_wants_it():
    driver = Driver()
    driver.go.clear()
    made = ahead(driver, [5, 7, 9])
    wait_until_made(driver, 1)  # 5 is in work
    taken = []
    taker = threading.Thread(target=lambda: taken.append(made.take(9)), name="taker")
    taker.start()
    wait_until_made(driver, 1)
    driver.go.set()
    taker.join(10)
    taken += [made.take(5), made.take(7)]
    assert sorted(driver.sizes) == [5, 7, 9] and set(taken) == driver.alive
    assert "taker" in driver.threads


def test_piece_that_nobody_announced():
    driver = Driver()
    made = ahead(driver, [])
    assert made.take(4) == (4, 0)
    assert driver.threads == {threading.current_thread().name}


def test_close_gives_back_what_nobody_took():
    driver = Driver()
    made = ahead(driver, [1, 2, 3])
    wait_until_made(driver, 3)
    taken = made.take(2)
    made.close()
    assert driver.alive == {taken}
    made.close()


def test_close_waits_for_the_piece_in_work_and_makes_no_other():
    driver = Driver()
    driver.go.clear()
    made = ahead(driver, [1, 2, 3])
    wait_until_made(driver, 1)
    threading.Timer(0.05, driver.go.set).start()
    made.close()
    assert driver.sizes == [1] and not driver.alive


def test_error_reaches_whoever_wants_the_piece(monkeypatch):
    warnings = []
    monkeypatch.setattr(
        made_ahead.logger, "warning", lambda *args: warnings.append(args)
    )
    driver = Driver(fail_at=1)
    made = ahead(driver, [1, 2, 3])
    wait_until_made(driver, 2)
    assert made.take(1) == (1, 0)
    with pytest.raises(MemoryError, match="no 2 bytes"):
        made.take(2)
    [(_, error)] = warnings
    assert str(error) == "no 2 bytes"
    driver.fail_at = None
    assert made.take(3) == (3, 1)
    made.close()
