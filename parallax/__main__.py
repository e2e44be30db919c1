"""The console script; `python -m parallax` is the same. Ctrl-C while modules load ends it without a traceback."""

import os
import signal
import sys

INTERRUPTED = 130  # as shells have it


def main() -> int:
    signal.signal(signal.SIGINT, _interrupt)
    from parallax.cli import main as run

    return run()


def _interrupt(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(
        INTERRUPTED
    )  # an exception would be raised in the middle of an import; nothing is open that must be closed


if __name__ == "__main__":
    sys.exit(main())
