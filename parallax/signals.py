"""Ctrl-C and SIGTERM. No jax."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WATCHED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def first_signal(receive: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Calls `receive` with the first of the two that comes meanwhile. A second one does what it does to any program:
    it ends this one at once."""

    def handle(number: int, _: object) -> None:
        for watched in WATCHED:
            signal.signal(watched, signal.SIG_DFL)
        receive(signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in WATCHED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
