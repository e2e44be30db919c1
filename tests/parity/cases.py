"""Cases for the parity tests: a pairwise covering array over models, layouts, schedules, remat, microbatches, zero."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from parallax.config import Log, Model, Optimizer, Parallel, RunConfig, Train

LAYOUTS = {
    "dp8": {"dp": 8},
    "pp8": {"pp": 8},
    "tp8": {"tp": 8},
    "pp4-tp2": {"pp": 4, "tp": 2},
    "dp2-pp2-tp2": {"dp": 2, "pp": 2, "tp": 2},
    "dp3-pp2": {"dp": 3, "pp": 2},
    "dp4-pp2-tp2": {"dp": 4, "pp": 2, "tp": 2},
}
FACTORS: dict[str, tuple] = {
    "family": ("llama", "gpt"),
    "layout": tuple(LAYOUTS),
    "schedule": ("1f1b", "interleaved", "gpipe"),
    "virtual_stages": (1, 2, 3),
    "remat": ("none", "selective", "full"),
    "microbatches": ("fewer", "equal", "not a multiple"),  # than, to, of pp
    "zero": (0, 1),
}


@dataclass(frozen=True)
class Case:
    family: str
    layout: str
    schedule: str
    virtual_stages: int
    remat: str
    microbatches: str
    zero: int
    sequence_parallel: bool = True
    skip_idle: bool = False
    tied: bool = False

    @property
    def legal(self) -> bool:
        interleaves = self.schedule == "interleaved" and self.pp > 1
        return (self.virtual_stages == 1 or interleaves) and (self.pp > 1 or self.microbatches == "equal")

    @property
    def pp(self) -> int:
        return LAYOUTS[self.layout].get("pp", 1)

    @property
    def m(self) -> int:
        return {"fewer": self.pp - 1, "equal": self.pp, "not a multiple": self.pp + 1 + self.pp // 4}[self.microbatches]

    def __str__(self) -> str:
        v = f"-v{self.virtual_stages}" if self.virtual_stages > 1 else ""
        options = f"{'' if self.sequence_parallel else '-whole'}{'-skip' * self.skip_idle}{'-tied' * self.tied}"
        return f"{self.family}-{self.layout}-{self.schedule}{v}-{self.remat}-m{self.m}-zero{self.zero}{options}"

    def parallel(self) -> Parallel:
        sizes = LAYOUTS[self.layout]
        names = ("virtual_stages", "schedule", "zero", "sequence_parallel", "skip_idle")
        return Parallel(**sizes, **{name: getattr(self, name) for name in names})

    def run_config(self, seq_len: int = 32, micro_batch_size: int = 2) -> RunConfig:
        parallel = self.parallel()
        return RunConfig(
            model=Model(name=self.family),
            parallel=parallel,
            train=Train(
                steps=10,
                seq_len=seq_len,
                global_batch_size=self.m * parallel.dp * micro_batch_size,
                micro_batch_size=micro_batch_size,
                remat=self.remat,  # type: ignore[arg-type]
                precision="float32",
            ),
            # Llama 2's epsilon (arXiv 2307.09288, section 2.2). Adam divides a gradient by its own size: with 1e-8, an
            # element whose gradient is all rounding moves by a whole learning rate in a random direction.
            optimizer=Optimizer(learning_rate=1e-3, warmup_steps=2, clip_norm=0.5, epsilon=1e-5),
            log=Log(dir="unused"),
        )

    @property
    def layers(self) -> int:
        stages = self.pp * self.virtual_stages
        return stages if stages >= 8 else 2 * stages


EXTRAS = [  # what the array does not vary
    Case("llama", "dp2-pp2-tp2", "interleaved", 2, "selective", "equal", 1, sequence_parallel=False),
    Case("gpt", "tp8", "1f1b", 1, "full", "equal", 1, sequence_parallel=False),
    Case("llama", "dp3-pp2", "interleaved", 2, "full", "not a multiple", 1, skip_idle=True),
    Case("llama", "pp4-tp2", "1f1b", 1, "none", "equal", 1, tied=True),
]


def pairs(case: Case) -> Iterator[tuple]:
    """All pairs of (factor, value) that a case covers."""
    return itertools.combinations(((f, getattr(case, f)) for f in FACTORS), 2)


def all_cases() -> list[Case]:
    return [case for values in itertools.product(*FACTORS.values()) if (case := Case(*values)).legal]


def covering_array(seed: int = 0) -> list[Case]:
    """Greedy: the case that covers most pairs not covered yet, until every legal pair is."""
    cases = [all_cases()[i] for i in np.random.default_rng(seed).permutation(len(all_cases()))]
    missing = {pair for case in cases for pair in pairs(case)}
    gain: Callable[[Case], int] = lambda case: sum(pair in missing for pair in pairs(case))
    chosen = []
    while missing:
        best = max(cases, key=gain)
        chosen.append(best)
        missing -= set(pairs(best))
    return sorted(chosen, key=str)
