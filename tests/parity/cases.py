"""Cases for the parity tests: pairwise covering arrays over models, layouts, schedules, remat, microbatches and zero,
without context parallelism and, with the ways it can be had, with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parallax.config import Data, Log, Model, Optimizer, Parallel, RunConfig, Train

LAYOUTS = {
    "dp8": {"dp": 8},
    "pp8": {"pp": 8},
    "tp8": {"tp": 8},
    "pp4-tp2": {"pp": 4, "tp": 2},
    "dp2-pp2-tp2": {"dp": 2, "pp": 2, "tp": 2},
    "dp3-pp2": {"dp": 3, "pp": 2},
    "dp4-pp2-tp2": {"dp": 4, "pp": 2, "tp": 2},
}
CONTEXT_LAYOUTS = {
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "pp2-tp2-cp2": {"pp": 2, "tp": 2, "cp": 2},
    "dp2-pp2-tp2-cp2": {"dp": 2, "pp": 2, "tp": 2, "cp": 2},
}
EXTRA_LAYOUTS = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2-tp4": {"pp": 2, "tp": 4},
    "tp8-cp2": {"tp": 8, "cp": 2},
}
SIZES = LAYOUTS | CONTEXT_LAYOUTS | EXTRA_LAYOUTS
FACTORS: dict[str, tuple] = {
    "family": ("llama", "gpt"),
    "layout": tuple(LAYOUTS),
    "schedule": ("1f1b", "interleaved", "gpipe"),
    "virtual_stages": (1, 2, 3),
    "remat": ("none", "selective", "full"),
    "microbatches": ("fewer", "equal", "not a multiple"),  # than, to, of pp
    "zero": (0, 1),
}
CONTEXT_FACTORS = FACTORS | {
    "layout": tuple(CONTEXT_LAYOUTS),
    "context": ("ring", "all_gather"),
    "seq_len": (96, 128),
    "documents": (False, True),  # attention kept inside them
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
    context: str = "ring"
    seq_len: int = 32
    documents: bool = False
    layers: int = 0  # 0: even stages
    vocab_size: int = 256

    @property
    def legal(self) -> bool:
        interleaves = self.schedule == "interleaved" and self.pp > 1
        return (self.virtual_stages == 1 or interleaves) and (self.pp > 1 or self.microbatches == "equal")

    @property
    def pp(self) -> int:
        return SIZES[self.layout].get("pp", 1)

    @property
    def m(self) -> int:
        return {"fewer": self.pp - 1, "equal": self.pp, "not a multiple": self.pp + 1 + self.pp // 4}[self.microbatches]

    def __str__(self) -> str:
        v = f"-v{self.virtual_stages}" if self.virtual_stages > 1 else ""
        options = f"{'' if self.sequence_parallel else '-whole'}{'-skip' * self.skip_idle}{'-tied' * self.tied}"
        if "cp" in SIZES[self.layout]:
            options += f"-{self.context}-s{self.seq_len}{'-documents' * self.documents}"
        options += f"-layers{self.layers}" * bool(self.layers) + f"-vocab{self.vocab_size}" * (self.vocab_size != 256)
        return f"{self.family}-{self.layout}-{self.schedule}{v}-{self.remat}-m{self.m}-zero{self.zero}{options}"

    def parallel(self) -> Parallel:
        sizes = SIZES[self.layout]
        names = ("virtual_stages", "schedule", "zero", "sequence_parallel", "skip_idle", "context")
        return Parallel(**sizes, **{name: getattr(self, name) for name in names})

    def run_config(self, micro_batch_size: int = 2) -> RunConfig:
        parallel = self.parallel()
        return RunConfig(
            model=Model(name=self.family),
            parallel=parallel,
            train=Train(
                steps=10,
                seq_len=self.seq_len,
                global_batch_size=self.m * parallel.dp * micro_batch_size,
                micro_batch_size=micro_batch_size,
                remat=self.remat,  # type: ignore[arg-type]
                precision="float32",
            ),
            # Llama 2's epsilon (arXiv 2307.09288, section 2.2). Adam divides a gradient by its own size: with 1e-8, an
            # element whose gradient is all rounding moves by a whole learning rate in a random direction.
            optimizer=Optimizer(learning_rate=1e-3, warmup_steps=2, clip_norm=0.5, epsilon=1e-5),
            data=Data(isolate_documents=self.documents),
            log=Log(dir="unused"),
        )

    @property
    def depth(self) -> int:
        """Layers of the model."""
        stages = self.pp * self.virtual_stages
        return self.layers or (stages if stages >= 8 else 2 * stages)


EXTRAS = [  # what the arrays do not vary
    Case("llama", "dp2-pp2-tp2", "interleaved", 2, "selective", "equal", 1, sequence_parallel=False),
    Case("gpt", "tp8", "1f1b", 1, "full", "equal", 1, sequence_parallel=False),
    Case("llama", "dp3-pp2", "interleaved", 2, "full", "not a multiple", 1, skip_idle=True),
    Case("llama", "pp4-tp2", "1f1b", 1, "none", "equal", 1, tied=True),
    # fewer key/value heads than tp, passed round a ring
    Case("llama", "tp8-cp2", "1f1b", 1, "none", "equal", 1, seq_len=96),
    # layers that stages do not divide: 7 on 4 stages, 10 on 4, with tp, dp and cp too
    Case("llama", "pp2", "interleaved", 2, "none", "not a multiple", 1, layers=7),
    Case("gpt", "pp2", "interleaved", 2, "full", "equal", 0, layers=7),
    Case("gpt", "pp4", "1f1b", 1, "selective", "equal", 1, layers=10),
    Case("llama", "pp4", "gpipe", 1, "full", "fewer", 1, layers=10, skip_idle=True),
    Case("llama", "dp3-pp2", "interleaved", 2, "none", "equal", 1, layers=7),
    # vocabularies that pp · tp does not divide, tied or not
    Case("llama", "pp2-tp4", "1f1b", 1, "full", "equal", 1, vocab_size=1000),
    Case("gpt", "pp2-tp4", "interleaved", 2, "none", "equal", 1, vocab_size=1000),
    Case("llama", "pp2-tp4", "interleaved", 2, "selective", "equal", 1, vocab_size=1003),
    Case("gpt", "pp2-tp4", "1f1b", 1, "full", "not a multiple", 0, vocab_size=1003),
    Case(
        *("llama", "dp2-pp2-tp2-cp2", "interleaved", 2, "selective", "equal", 1),
        tied=True,
        seq_len=96,
        documents=True,
        layers=7,
        vocab_size=1003,
    ),
]


def pairs(case: Case, factors: dict[str, tuple] = FACTORS) -> Iterator[tuple]:
    """All pairs of (factor, value) that a case covers."""
    return itertools.combinations(((f, getattr(case, f)) for f in factors), 2)


def all_cases(factors: dict[str, tuple] = FACTORS) -> list[Case]:
    cases = (Case(**dict(zip(factors, values, strict=True))) for values in itertools.product(*factors.values()))
    return [case for case in cases if case.legal]


def covering_array(factors: dict[str, tuple] = FACTORS, seed: int = 0) -> list[Case]:
    """Greedy: the case that covers most pairs not covered yet, until every legal pair is."""
    legal = all_cases(factors)
    cases = [legal[i] for i in np.random.default_rng(seed).permutation(len(legal))]
    left = {case: set(pairs(case, factors)) for case in cases}  # what choosing a case would cover
    chosen = []
    while left := {case: gain for case, gain in left.items() if gain}:
        best = max(left, key=lambda case: len(left[case]))
        covered = left.pop(best)
        chosen.append(best)
        left = {case: gain - covered for case, gain in left.items()}
    return sorted(chosen, key=str)
