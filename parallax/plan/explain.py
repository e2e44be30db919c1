"""Why a plan is as it is: the six steps of Megatron-LM's guidance, with this model's numbers. No jax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One decision: what is asked, what was decided, and the reasons, a sentence each."""

    question: str
    answer: str
    reasons: tuple[str, ...]
