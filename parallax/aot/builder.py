"""Runs a build in a process of its own and collects what it left. No jax."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallax.aot.buffers import Buffer, largest_buffers
from parallax.aot.target import environment
from parallax.machine import Machine
from parallax.output import write_whole

_OUT_OF_MEMORY = tuple(
    re.compile(words.replace("SIZE", r"([\d.]+)([KMGT])"))
    for words in ("[Uu]sed SIZE of SIZE hbm", r"\(SIZE\) exceeds available HBM \(SIZE\)")
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class BuildError(RuntimeError):
    """The compiler did not build the program. `needs_bytes` is what it said a device would need, where it said so."""

    def __init__(self, message: str, needs_bytes: float | None = None):
        super().__init__(message)
        self.needs_bytes = needs_bytes


@dataclass(frozen=True)
class Built:
    """What the compiler made: memory of one device, the scheduled program's text, its largest buffers, its log."""

    compile_s: float
    arguments_bytes: int
    outputs_bytes: int  # beside the arguments that they take the place of
    temporaries_bytes: int
    program: str
    buffers: tuple[Buffer, ...]
    log: str

    @property
    def peak_bytes(self) -> int:
        return self.arguments_bytes + self.outputs_bytes + self.temporaries_bytes


def build(run_file: str, overrides: Sequence[str], machine: Machine, save: str | None) -> Built:
    """Builds the train step of a run file. Raises BuildError where the compiler fails, whatever way it ends."""
    with tempfile.TemporaryDirectory(prefix="parallax-compile-") as name:
        folder, dump = Path(name), Path(name) / "dump"
        request = {"run_file": run_file, "overrides": list(overrides), "folder": name, "save": bool(save)}
        (folder / "request.json").write_text(json.dumps(request))
        log = folder / "log"
        with log.open("wb") as file, _child(str(folder / "request.json"), machine, str(dump), file) as child:
            status = child.wait()
        text = log.read_text(errors="replace")
        if status:
            raise _failure(status, text)
        if not (folder / "memory.json").exists():
            raise BuildError("the compiler left no memory.json")
        facts = json.loads((folder / "memory.json").read_text())
        program = _dumped(dump, "after_optimizations.txt")
        if save:
            write_whole(Path(save), (folder / "executable").read_bytes())
        return Built(
            facts["compile_s"],
            facts["arguments"],
            max(0, facts["outputs"] - facts["aliased"]),
            facts["temporaries"],
            program,
            tuple(largest_buffers(_dumped(dump, "after_optimizations-buffer-assignment.txt"), program)),
            text,
        )


@contextmanager
def _child(request: str, machine: Machine, dump: str, log) -> Iterator[subprocess.Popen]:
    """The process that builds; it does not outlive this one's attention."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "parallax.aot.build", request],
        env=environment(machine, dump),
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _dumped(folder: Path, suffix: str) -> str:
    """The largest dumped text of that kind: the step's, where smaller programs were compiled beside it."""
    paths = sorted(folder.glob(f"*jit_step*{suffix}"), key=lambda path: path.stat().st_size)
    if not paths:
        raise BuildError(f"the compiler left no {suffix}")
    return paths[-1].read_text()


def _failure(status: int, log: str) -> BuildError:
    if match := next(filter(None, (form.search(log) for form in _OUT_OF_MEMORY)), None):
        used, unit, of, of_unit = match.groups()
        return BuildError(f"the compiler ran out of memory: {used}{unit} of {of}{of_unit}", float(used) * _UNITS[unit])
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return BuildError(f"the compiler {how}: {_cause(log)}")


def _cause(log: str) -> str:
    """The line of a log that says most."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    fatal = [re.sub(r"^F\d{4} [\d:.]+\s+\d+ ", "", line) for line in lines if re.match(r"F\d{4} ", line)]
    errors = [line for line in lines if re.search(r"(Error|error|Check failed|INTERNAL|UNIMPLEMENTED)\b", line)]
    return (fatal[:1] or errors[-1:] or lines[-1:] or ["it said nothing"])[0][:300]
