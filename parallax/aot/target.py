"""A machine that is not there, as XLA wants it described: topology, environment, the plugin it needs. No jax."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from parallax.config import ConfigError, either
from parallax.environment import GPU_SHARE, keep_32_bits, tune_gpus
from parallax.machine import Machine

CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
PACKAGES = Path(__file__).parents[2]  # the process that builds runs this parallax, and no other
DUMP_FLAGS = ("--xla_dump_hlo_as_text", "--xla_dump_hlo_module_re=jit_step")
MOST_SLICE = {"v5e": 256, "v6e": 256, "v5p": 8960}


def topology_name(machine: Machine, devices: int) -> str:
    """`v5p:4x4x4` for TPU slices, `1x8x8` (slices, hosts, devices of a host) for GPUs. Raises ConfigError where no
    machine of so many devices is made."""
    if machine.platform == "gpu":
        node = machine.devices_per_node
        if devices <= node:
            return f"1x1x{devices}"
        if devices % node:
            below = devices // node * node
            raise ConfigError([_no_such(machine, devices, f"nodes have {node}", [below, below + node])])
        return f"1x{devices // node}x{node}"
    generation = str(machine.compile_target["topology"])
    dimensions = 3 if generation == "v5p" else 2
    shapes = {math.prod(shape): shape for shape in _slices(dimensions, MOST_SLICE[generation])}
    if devices not in shapes:
        near = [n for n in shapes if n < devices][-1:] + [n for n in shapes if n > devices][:1]
        raise ConfigError([_no_such(machine, devices, f"slices are {dimensions}-dimensional tori", near)])
    return f"{generation}:{'x'.join(map(str, shapes[devices]))}"


def _no_such(machine: Machine, devices: int, rule: str, near: list[int]) -> str:
    use = either(str(n) for n in near if n)
    return f"parallel: {devices} devices make no {machine.name} topology ({rule}); use {use} devices"


def _slices(dimensions: int, most: int) -> Iterator[tuple[int, ...]]:
    """Slices that are offered, by size: each doubles the smallest side of the one before, from a host of 2 x 2 on."""
    shape = [1] * dimensions
    if dimensions == 2:
        yield (1, 1)
    shape[0] = shape[1] = 2
    while math.prod(shape) <= most:
        yield tuple(sorted(shape)) if dimensions == 2 or min(shape) > 1 else tuple(shape)
        shape[min(range(dimensions - 1, -1, -1), key=shape.__getitem__)] *= 2


def environment(machine: Machine, dump: str, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of the process that builds: those of this one, XLA_FLAGS among them, and ours. Its own backend is the
    CPU's: it describes devices and runs nothing."""
    variables = dict(own)
    variables["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), *filter(None, [own.get("PYTHONPATH")])])
    keep_32_bits(variables)
    if machine.platform == "gpu":
        tune_gpus(variables)
    if machine.platform == "tpu":  # no metadata server, and other builds may run beside this one
        variables |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    flags = [variables.get("XLA_FLAGS", ""), f"--xla_dump_to={dump}", *DUMP_FLAGS]
    return variables | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "0", "XLA_FLAGS": " ".join(flags)}


def missing(machine: Machine) -> str | None:
    """What must be installed to build for a machine, in one line; None where it is here."""
    if machine.platform == "tpu" and find_spec("libtpu") is None:
        return f"{machine.name} needs libtpu, which is not installed; use pip install 'parallax-train[tpu-aot]'"
    if machine.platform == "gpu" and not any(map(_is_there, CUDA_PLUGINS)):
        use = "pip install 'parallax-train[cuda-aot]'"
        return f"{machine.name} needs jax's CUDA plugin, which is not installed; use {use}"
    return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def device_description(machine: Machine) -> str:
    """The GPU as XLA's GpuTargetConfigProto in text form, from the figures of the mesh file. But for its memory: a
    build takes 80 % of it for what a run has, where a run knows what it has."""
    target = machine.compile_target
    major, minor = str(target["capability"]).split(".")
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": target["shared_memory_per_core"],
        "threads_per_core_limit": 2048,
        "core_count": target["cores"],
        "fpus_per_core": target["fpus_per_core"],
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(machine.hbm_bytes_per_s),
        "l2_cache_size": target["l2_bytes"],
        "clock_rate_ghz": target["clock_ghz"],
        "device_memory_size": round(GPU_SHARE / 0.8 * machine.hbm_bytes),
        "shared_memory_per_block_optin": target["shared_memory_per_block"],
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    return (
        f"gpu_device_info {{ {info} cuda_compute_capability {{ major: {major} minor: {minor} }} }}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 12 }\n"
        "runtime_version { major: 13 minor: 0 patch: 0 }\n"
        f'device_description_str: "{target["description"]}"\n'
    )
