# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory that a thread makes before it is wanted.

A driver creates pinned host pages slowly (0.2 s per GiB on the host of an H200) and
without Python's lock, so it can do so while a checkpoint is read.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from vllm.logger import init_logger

logger = init_logger(__name__)

Memory = TypeVar("Memory")


class MadeAhead(Generic[Memory]):
    """Makes pieces of memory in the order in which they are going to be taken.

    It may run ahead to the last one, and makes none that nobody takes, if what is
    taken is what was announced.

    Args:
        sizes: Bytes of the pieces, in order.
        create: Makes a piece of some bytes; may raise.
        release: Gives one back.

    """

    def __init__(
        self,
        sizes: Iterable[int],
        create: Callable[[int], Memory],
        release: Callable[[Memory], object],
    ):
        self._create = create
        self._release = release
        self._waiting = deque(sizes)
        self._making: int | None = None
        self._made: defaultdict[int, list[Memory]] = defaultdict(list)
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="made-ahead", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    return
                size = self._making = self._waiting.popleft()
            try:
                made = [self._create(size)]
            except Exception as error:
                # Whoever wants the piece tries again, and gets the error if it stays.
                logger.warning("No memory is made ahead any more: %s", error)
                made = []
            with self._changed:
                self._making = None
                if made:
                    self._made[size] += made
                else:
                    self._waiting.clear()
                self._changed.notify_all()

    def take(self, size: int) -> Memory:
        """Get a piece; one that was not made in time is made here.

        Raises:
            Exception: What `create` raises.

        """
        with self._changed:
            self._changed.wait_for(lambda: self._making != size or self._made[size])
            if self._made[size]:
                return self._made[size].pop()
            if size in self._waiting:
                self._waiting.remove(size)
        return self._create(size)

    def close(self) -> None:
        """Make no more, and give back what nobody took."""
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: self._making is None)
            left = [piece for made in self._made.values() for piece in made]
            self._made.clear()
        for piece in left:
            self._release(piece)
