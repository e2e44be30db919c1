"""Builds a run's train step for a machine that is not there; a process of its own, since a partitioner may abort.

    python -m parallax.aot.build REQUEST.json

The request names the run file, its overrides and where results go; see `parallax.aot.builder`.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from parallax.aot.target import device_description, topology_name
from parallax.machine import Machine
from parallax.mesh import make_mesh
from parallax.model import Model
from parallax.optimizer import TrainState
from parallax.program import Batch, Program
from parallax.validate import Resolved, resolve

PR_SET_PDEATHSIG = 1


def build(resolved: Resolved) -> tuple[Any, float]:
    """→ the compiled train step, and the seconds that tracing and compiling took."""
    config, machine = resolved.config, resolved.machine
    mesh = make_mesh(config.parallel, topology_devices(machine, config.devices))
    model = Model(resolved.model_module, resolved.model_config, resolved.shape, config.train.remat)
    program = Program(config, model, mesh)
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        compiled = program.train_step.lower(*arguments(program)).compile()
    return compiled, time.perf_counter() - start


def topology_devices(machine: Machine, devices: int) -> Any:
    """jax devices that stand for those of the machine."""
    name = topology_name(machine, devices)
    if machine.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    description = device_description(machine)
    return topologies.get_topology_desc(platform="cuda", topology=name, target_config=description).devices


def arguments(program: Program) -> tuple[TrainState, Batch]:
    """Shapes and shardings of what the train step takes."""
    config, described = program.config, jax.ShapeDtypeStruct
    state = jax.eval_shape(lambda: program.init(jax.random.key(0)))
    state = jax.tree.map(lambda x, s: described(x.shape, x.dtype, sharding=s), state, program.state_shardings)
    rows = config.train.global_batch_size // config.microbatches
    tokens = (config.microbatches, rows, config.train.seq_len)
    shardings, cells = program.batch_shardings, program.table.cells
    batch = Batch(
        described(tokens, "int32", sharding=shardings.tokens),
        described(tokens, "int32", sharding=shardings.targets),
        shardings.starts and described(tokens, "int32", sharding=shardings.starts),
        described(cells.shape, cells.dtype, sharding=shardings.cells),
    )
    return state, batch


def end_with_parent() -> None:
    """A build does not go on where the command that asked for it is killed (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(request: dict[str, Any]) -> None:
    """Writes memory.json, and where asked the serialized executable, into the folder of the request."""
    folder = Path(request["folder"])
    compiled, seconds = build(resolve(request["run_file"], request["overrides"]))
    memory = compiled.memory_analysis()
    if request["save"]:
        (folder / "executable").write_bytes(compiled.runtime_executable().serialize())
    facts = {
        "compile_s": seconds,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    (folder / "memory.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    end_with_parent()
    main(json.loads(Path(sys.argv[1]).read_text()))
