"""The environment variables that emulated CPU devices need. To be set before jax is imported; imports no jax."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

COLLECTIVE_TIMEOUT_S = 600


def emulate_devices(count: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes one CPU look like `count` devices to the jax that this process imports afterwards.

    Flags that the user has set in XLA_FLAGS win over ours, since XLA reads them last. NPROC sizes XLA's thread pool:
    with fewer than two threads a device, collectives can wait for each other for ever.
    """
    ours = (
        f"--xla_force_host_platform_device_count={count}",
        # The pass aborts on bfloat16 reductions inside a partly manual shard_map.
        "--xla_disable_hlo_passes=all-reduce-promotion",
        # Many devices share few cores: a slow step is not a stuck one.
        f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={COLLECTIVE_TIMEOUT_S}",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={2 * COLLECTIVE_TIMEOUT_S}",
    )
    environment["XLA_FLAGS"] = " ".join([*ours, environment.get("XLA_FLAGS", "")]).strip()
    environment["JAX_PLATFORMS"] = "cpu"
    environment.setdefault("NPROC", str(2 * count))
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
