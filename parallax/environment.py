"""The environment variables that a platform needs. To be set before jax is imported; imports no jax."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

COLLECTIVE_TIMEOUT_S = 600
DISABLE = "--xla_disable_hlo_passes"
GPU_FLAGS = (
    # Latency hiding is on by default; this lets a send run beside the layers' own collectives.
    "--xla_gpu_experimental_parallel_collective_overlap_limit=4",
    # Per cent of what a run has and its arguments leave. Beyond, XLA computes things again, and undoes what train.remat
    # says, which is there to make a run fit.
    "--xla_gpu_memory_limit_slop_factor=100",
)
GPU_SHARE = (
    0.92  # of the memory, that a run has; the planner leaves the rest free, for what lies outside of the program
)
PROMOTION = "all-reduce-promotion"  # the pass aborts on bfloat16 reductions inside a partly manual shard_map


def keep_32_bits(environment: MutableMapping[str, str] = os.environ) -> None:
    """Overrules a user's JAX_ENABLE_X64=1: the programs count in int32 and compute in at most float32."""
    environment["JAX_ENABLE_X64"] = "0"


def emulate_devices(count: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes one CPU look like `count` devices to the jax that this process imports afterwards.

    Flags that the user has set in XLA_FLAGS win over ours, since XLA reads them last; the passes that the user
    disables are disabled besides ours. NPROC sizes XLA's thread pool: with fewer than two threads a device,
    collectives can wait for each other for ever, so that the user's is only ever raised.
    """
    keep_32_bits(environment)
    theirs = environment.get("XLA_FLAGS", "")
    passes = re.findall(rf"{DISABLE}=(\S*)", theirs)[-1:]  # XLA heeds the last
    disabled = dict.fromkeys(filter(None, [*",".join(passes).split(","), PROMOTION]))
    ours = (
        f"--xla_force_host_platform_device_count={count}",
        # Many devices share few cores: a slow step is not a stuck one.
        f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={COLLECTIVE_TIMEOUT_S}",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={2 * COLLECTIVE_TIMEOUT_S}",
    )
    theirs = re.sub(rf"{DISABLE}=\S*", "", theirs)
    environment["XLA_FLAGS"] = " ".join([*ours, f"{DISABLE}={','.join(disabled)}", *theirs.split()])
    environment["JAX_PLATFORMS"] = "cpu"
    threads = environment.get("NPROC", "")
    environment["NPROC"] = str(max(2 * count, int(threads) if re.fullmatch("[0-9]{1,6}", threads) else 0))
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def tune_gpus(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks XLA for what our programs need on GPUs; what the user has set wins (of XLA_FLAGS, XLA heeds the last)."""
    environment["XLA_FLAGS"] = " ".join([*GPU_FLAGS, *environment.get("XLA_FLAGS", "").split()])
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_SHARE))
