"""Train steps compiled for abstract inputs: nothing is allocated and nothing runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from parallax.config import Log, Model, Parallel, RunConfig, Train
from parallax.mesh import make_mesh
from parallax.model import Model as Functions
from parallax.models import llama
from parallax.program import Batch, Program


def program(
    parallel: Parallel,
    m: int,
    *,
    devices=None,
    layers=8,
    seq_len=128,
    micro_batch_size=1,
    remat: Any = "full",
    precision: Any = "float32",
    **sizes: Any,
) -> Program:
    """A small Llama on a layout, with `m` microbatches a step"""
    widths: dict[str, Any] = {"vocab_size": 512, "width": 128, "heads": 4, "kv_heads": 4, "ff": 256} | sizes
    config = llama.Config(**widths, layers=layers, rope_theta=10_000.0)
    train = Train(
        steps=10,
        seq_len=seq_len,
        global_batch_size=m * parallel.dp * micro_batch_size,
        micro_batch_size=micro_batch_size,
        remat=remat,
        precision=precision,
    )
    run = RunConfig(model=Model(name="llama"), parallel=parallel, train=train, log=Log(dir="unused"))
    return Program(run, Functions(llama, config, config.shape(), remat), make_mesh(parallel, devices))


def compile_step(built: Program) -> Any:
    """The compiled train step"""
    train = built.config.train
    rows = jax.ShapeDtypeStruct(
        (built.config.microbatches, train.global_batch_size // built.config.microbatches, train.seq_len), jnp.int32
    )
    cells = jax.ShapeDtypeStruct(built.table.cells.shape, jnp.int32)
    with jax.set_mesh(built.mesh):
        state = jax.eval_shape(lambda: built.init(jax.random.key(0)))
        return built.train_step.lower(state, Batch(rows, rows, None, cells)).compile()
