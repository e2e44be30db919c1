"""Sixteen emulated CPU devices for the whole test process, set before anything imports jax."""

from parallax.environment import emulate_devices

emulate_devices(16)
