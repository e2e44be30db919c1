"""Reads the text of a compiled program: its instructions, its loops, and its collectives by mesh axis. No jax."""

from parallax.hlo.collectives import KINDS, Collective, collective, collectives
from parallax.hlo.program import Array, Instruction, Loop, Program

__all__ = ["KINDS", "Array", "Collective", "Instruction", "Loop", "Program", "collective", "collectives"]
