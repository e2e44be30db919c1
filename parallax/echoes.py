"""Tracebacks that threads of libraries print of an error which they also raise where it is dealt with: left out."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Coroutine
from functools import cache


@cache
def leave_out_echoes() -> None:
    """From here on, for this process; all else goes to the hooks that are there now.

    After a file that cannot be read or written, tensorstore's threads find orbax's event loop closed, coroutines of
    orbax's that nobody waits for any more repeat the error, and TensorBoard's writer ends with it.
    """
    of_program, of_garbage, of_thread = sys.excepthook, sys.unraisablehook, threading.excepthook

    def excepthook(kind, error, traceback) -> None:
        if threading.current_thread() is threading.main_thread() or not _loop_is_closed(error):
            of_program(kind, error, traceback)

    def unraisablehook(unraisable) -> None:
        coroutine = unraisable.object
        code = coroutine.cr_code.co_filename if isinstance(coroutine, Coroutine) else ""  # type: ignore[attr-defined]
        if "orbax" not in code and not _loop_is_closed(unraisable.exc_value):
            of_garbage(unraisable)

    def thread_excepthook(args) -> None:
        writes_events = type(args.thread).__module__ == "tensorboard.summary.writer.event_file_writer"
        if not (writes_events and isinstance(args.exc_value, OSError)) and not _loop_is_closed(args.exc_value):
            of_thread(args)

    sys.excepthook, sys.unraisablehook, threading.excepthook = excepthook, unraisablehook, thread_excepthook
    # what libraries say of coroutines that were given up: we have none of our own
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)


def _loop_is_closed(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
