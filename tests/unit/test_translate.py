"""`parallax translate`: command lines of Megatron-LM, and what they must become, written out by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallax.cli import main
from parallax.config import ConfigError, RunConfig, load
from parallax.translate.flags import DEVIATES, FLAGS, IGNORED, MAPPED, REFUSED, TORCHRUN_OPTIONS
from parallax.translate.shell import training_command
from parallax.translate.translate import Translation, translate
from parallax.validate import resolve

ROOT = Path(__file__).parents[2]
# The line of NVIDIA's guide (Llama-3-70B row), with the flags that it leaves out.
PUBLISHED = (
    "pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --context-parallel-size 2 "
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --seq-length 8192 --sequence-parallel "
    "--micro-batch-size 1 --global-batch-size 512 --bf16"
)
GPT = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
GPT += "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 64 "
GPT += "--train-iters 500 --lr 1e-4 "
LLAMA_FLAGS = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
LLAMA3_8B = (
    "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --rotary-base 500000 --seq-length 8192 "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 "
    "--lr 3e-4 --min-lr 3e-5 --bf16 --tensor-model-parallel-size 2 --sequence-parallel " + LLAMA_FLAGS
)
SAMPLES = "--train-iters 500", "--train-samples 100000"


def value_of(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    table = getattr(config, section)
    return getattr(table, name) if hasattr(table, name) else table.overrides[name]


def translated(text: str, folder: Path, mesh: str | None = None) -> tuple[Translation, RunConfig]:
    """The translation, and its run file as `resolve` accepts it."""
    found = translate(text, mesh=mesh)
    assert found.run_toml is not None, found.refused
    path = folder / "run.toml"
    path.write_text(found.run_toml)
    return found, resolve(path).config


def refused(text: str, mesh: str | None = None) -> dict[str, str]:
    found = translate(text, mesh=mesh)
    assert found.run_toml is None
    return found.refused


# The line of the guide


def test_the_published_line_needs_more_nodes(capsys: pytest.CaptureFixture):
    assert main(["translate", f"torchrun --nproc_per_node=8 {PUBLISHED}"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: --nnodes 1 x --nproc_per_node 8 = 8 devices cannot hold --tensor-model-parallel-size 4 x "
        "--pipeline-model-parallel-size 4 x --context-parallel-size 2 = 32, of which they must be a multiple; "
        "use --nnodes 4 or 8 (data parallel 1 or 2)\n",
    )


def test_the_published_line_on_eight_nodes(tmp_path: Path):
    found, config = translated(f"torchrun --nproc_per_node=8 --nnodes 8 {PUBLISHED}", tmp_path)
    assert found.devices == 64 == config.devices
    parallel = {axis: getattr(config.parallel, axis) for axis in ("dp", "pp", "cp", "tp", "zero")}
    assert parallel == {"dp": 2, "pp": 4, "cp": 2, "tp": 4, "zero": 0}
    assert config.parallel.sequence_parallel and config.parallel.schedule == "1f1b"
    # 50,257 padded to a multiple of 128 x 4 is 99 x 512.
    sizes = {"width": 8192, "layers": 80, "heads": 64, "max_positions": 8192, "ff": 32768, "vocab_size": 50_688}
    assert sizes.items() <= config.model.overrides.items()
    assert config.model.name == "gpt3-175b"
    missing = ("ffn-hidden-size", "num-query-groups", "vocab-size", "position-embedding-type", "swiglu")
    missing += ("normalization", "disable-bias-linear", "untie-embeddings-and-output-weights")
    missing += ("max-position-embeddings", "train-iters", "lr")
    assert {f"--{name}" for name in missing} <= found.defaults.keys()
    assert "32768" in found.defaults["--ffn-hidden-size"] and "50688" in found.defaults["--vocab-size"]
    assert any("--attention-dropout" in what for what in found.deviations)


def test_what_the_document_prints(tmp_path: Path, capsys: pytest.CaptureFixture):
    document = (ROOT / "docs" / "translate.md").read_text()
    assert main(["translate", f"torchrun --nproc_per_node=8 {PUBLISHED}"]) == 2
    assert capsys.readouterr().err in document
    assert main(["translate", f"torchrun --nproc_per_node=8 --nnodes 8 {PUBLISHED}"]) == 0
    out, err = capsys.readouterr()
    assert err in document and out.partition("\n\n[mesh]")[0] in document


# What flags become: flags after GPT or LLAMA3_8B, and keys

KEYS = {
    "a plain GPT": (GPT, {"parallel.dp": 8, "train.steps": 500, "train.seq_len": 1024, "model.max_positions": 1024}),
    "no bf16": (GPT, {"train.precision": "float32"}),
    "bf16": (GPT + "--bf16", {"train.precision": "bfloat16"}),
    "fp16": (GPT + "--fp16", {"train.precision": "bfloat16"}),
    "tp": (GPT + "--tensor-model-parallel-size 4", {"parallel.tp": 4, "parallel.sequence_parallel": False}),
    "equals": (GPT + "--tensor-model-parallel-size=4", {"parallel.tp": 4, "parallel.dp": 2}),
    "pp": (GPT + "--pipeline-model-parallel-size 2", {"parallel.pp": 2, "parallel.schedule": "1f1b"}),
    "chunks": (
        GPT + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
        {"parallel.virtual_stages": 3, "parallel.schedule": "interleaved"},
    ),
    "layers a chunk": (
        GPT + "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
        {"parallel.virtual_stages": 2, "parallel.schedule": "interleaved"},
    ),
    "one chunk": (
        GPT + "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 6",
        {"parallel.virtual_stages": 1, "parallel.schedule": "1f1b"},
    ),
    "embedding counted": (
        GPT.replace("--num-layers 24", "--num-layers 22")
        + "--pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
        + "--account-for-loss-in-pipeline-split",
        {"model.layers": 22, "parallel.pp": 4},
    ),
    "placed layers": (
        GPT.replace("--num-layers 24", "--num-layers 23")
        + "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 5",
        {"model.layers": 23},
    ),
    "zero": (GPT + "--use-distributed-optimizer", {"parallel.zero": 1}),
    "no zero": (GPT, {"parallel.zero": 0}),
    "ring": (GPT + "--context-parallel-size 2 --cp-comm-type p2p", {"parallel.cp": 2, "parallel.context": "ring"}),
    "all-gather": (GPT + "--context-parallel-size 2 --cp-comm-type allgather", {"parallel.context": "all_gather"}),
    "no recomputation": (GPT, {"train.remat": "none"}),
    "full": (
        GPT + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        {"train.remat": "full"},
    ),
    "selective": (GPT + "--recompute-granularity selective", {"train.remat": "selective"}),
    "activations": (GPT + "--recompute-activations", {"train.remat": "selective"}),
    "one batch": (GPT.replace("--global-batch-size 64", ""), {"train.global_batch_size": 16}),
    "samples": (GPT.replace(*SAMPLES), {"train.steps": 1562}),  # 100,000 / 64 = 1,562.5
    # Batches of 32 up to 64 samples, where the 64 begin: 2 steps, and 99,936 / 64 = 1,561.5 more.
    "ramp": (
        GPT.replace(*SAMPLES) + "--rampup-batch-size 32 32 64",
        {"train.rampup_batch_size": (32, 32, 64), "train.steps": 1563},
    ),
    "optimizer": (
        GPT + "--min-lr 1e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.8 --adam-beta2 0.95 "
        "--adam-eps 1e-6 --clip-grad 0.5",
        {
            "optimizer.learning_rate": 1e-4,
            "optimizer.min_learning_rate_ratio": 0.1,
            "optimizer.schedule": "cosine",
            "optimizer.weight_decay": 0.1,
            "optimizer.beta1": 0.8,
            "optimizer.beta2": 0.95,
            "optimizer.epsilon": 1e-6,
            "optimizer.clip_norm": 0.5,
        },
    ),
    "Megatron-LM's optimizer": (
        GPT,
        {
            "optimizer.min_learning_rate_ratio": 0.0,
            "optimizer.schedule": "linear",
            "optimizer.weight_decay": 0.01,
            "optimizer.beta2": 0.999,
            "optimizer.clip_norm": 1.0,
            "train.seed": 1234,
            "train.eval_every": 1000,
            "train.eval_batches": 100,
            "log.every": 100,
        },
    ),
    "warm-up": (GPT + "--lr-warmup-iters 50", {"optimizer.warmup_steps": 50}),
    "share of warm-up": (GPT + "--lr-warmup-fraction 0.01", {"optimizer.warmup_steps": 5}),
    "samples of warm-up": (GPT.replace(*SAMPLES) + "--lr-warmup-samples 640", {"optimizer.warmup_steps": 10}),
    "no data": (GPT, {"data.source": "synthetic"}),
    "mock data": (GPT + "--mock-data", {"data.source": "synthetic"}),
    "data": (
        GPT + "--data-path /d/web_text_document --split 900,50,50",
        {"data.source": "/d/web_text_document", "data.valid_fraction": 0.1},
    ),
    "usual split": (GPT + "--data-path /d/web", {"data.valid_fraction": 0.031}),
    "mixture": (
        GPT + "--data-path 0.7 /d/web 0.3 /d/books --split 99,1,0",
        {"data.source": {"/d/web": 0.7, "/d/books": 0.3}, "data.valid_fraction": 0.01},
    ),
    "documents": (GPT + "--reset-attention-mask", {"data.isolate_documents": True}),
    "checkpoints": (
        GPT + "--save runs/a --save-interval 100",
        {"log.dir": "runs/a", "checkpoint.every": 100, "checkpoint.keep_every": 100},
    ),
    "kept checkpoints": (
        GPT + "--save runs/a --save-interval 100 --save-retain-interval 500",
        {"checkpoint.keep_every": 500},
    ),
    "logs": (GPT + "--log-interval 1 --eval-interval 50 --eval-iters 4 --seed 7", {"log.every": 1, "train.seed": 7}),
    "no evaluation": (GPT + "--eval-iters 0", {"train.eval_every": 0}),
    "vocabulary": (GPT + "--vocab-size 32000 --tensor-model-parallel-size 8", {"model.vocab_size": 32_768}),
    "padding of one's own": (GPT + "--vocab-size 32000 --make-vocab-size-divisible-by 1", {"model.vocab_size": 32_000}),
    "padded vocabulary": (GPT + "--padded-vocab-size 32100", {"model.vocab_size": 32_100}),
    "GPT-2's vocabulary": (GPT + "--tokenizer-type GPT2BPETokenizer", {"model.vocab_size": 50_304}),
    "NullTokenizer": (GPT + "--tokenizer-type NullTokenizer --vocab-size 1024", {"model.vocab_size": 1152}),
    "Llama": (
        GPT + LLAMA_FLAGS,
        # 8/3 x 1024 = 2,730.67 down to a multiple of 64; as many groups as heads
        {"model.ff": 2688, "model.kv_heads": 16, "model.rope_theta": 10_000.0, "model.tied": True},
    ),
    "Llama with heads of its own": (GPT + LLAMA_FLAGS + "--kv-channels 128", {"model.head_size": 128}),
    "a preset": (LLAMA3_8B, {"model.name": "llama3-8b", "model.overrides": {}, "parallel.dp": 8}),
    "a preset and its vocabulary": (LLAMA3_8B + "--vocab-size 128256", {"model.overrides": {}}),
    "not a preset": (LLAMA3_8B + "--vocab-size 100000", {"model.name": "llama3-8b", "model.vocab_size": 100_096}),
    "GPT-3": (
        "torchrun --nproc-per-node 8 --nnodes=16 pretrain_gpt.py --num-layers 96 --hidden-size 12288 "
        "--num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --tensor-model-parallel-size 8 "
        "--pipeline-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 1536 --train-iters 10 --lr 6e-5 "
        "--tokenizer-type GPT2BPETokenizer",
        {"model.name": "gpt3-175b", "model.overrides": {}, "parallel.dp": 1},  # 50,257 pads to 51,200 at TP 8
    ),
    "the last counts": (GPT + "--lr 5e-5 --lr 6e-5", {"optimizer.learning_rate": 6e-5}),
    "one device": ("python " + GPT.split("8 ", 1)[1], {"parallel.dp": 1}),
    "torch.distributed": ("python -m torch.distributed.launch " + GPT.split(" ", 1)[1], {"parallel.dp": 8}),
}


@pytest.mark.parametrize("name", KEYS)
def test_flags_become_keys(name: str, tmp_path: Path):
    text, expected = KEYS[name]
    _, config = translated(text, tmp_path)
    assert {key: value_of(config, key) for key in expected} == expected


def test_rope_scaling_of_llama_3_1(tmp_path: Path):
    sizes = "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128"
    text = re.sub("--num-layers.*--num-attention-heads 32", sizes, LLAMA3_8B).replace("--nnodes 2", "--nnodes 128")
    text = (
        text.replace("-size 2 ", "-size 8 ") + "--pipeline-model-parallel-size 16 --account-for-embedding-in-pipeline"
    )
    text += "-split --account-for-loss-in-pipeline-split --use-rope-scaling --rope-scaling-factor 8"
    _, config = translated(text, tmp_path)
    assert (config.model.name, config.model.overrides, config.devices) == ("llama3.1-405b", {}, 1024)


# Refusals: a command line, the flag, and parts of its line

WITH_PP4 = GPT + "--pipeline-model-parallel-size 4 "
REFUSALS = {
    "devices": (GPT + "--tensor-model-parallel-size 3", "--nnodes", "8 devices cannot hold", "--nnodes 3"),
    "nodes and batch": (  # two nodes of 12 hold 3 x 8, and 64 is no multiple of 3 x 2
        GPT.replace("node 8", "node 12") + "--tensor-model-parallel-size 8",
        "--nnodes",
        "use --nnodes 2 with a --global-batch-size that 6 divides",
    ),
    "batch": (
        GPT.replace("size 64", "size 60"),
        "--global-batch-size",
        "60 is not a multiple of --micro-batch-size 2 x data parallel 8 = 16; use 48 or 64",
    ),
    "layers": (
        GPT.replace("--num-layers 24", "--num-layers 22") + "--pipeline-model-parallel-size 4",
        "--num-layers",
        "22 is not a multiple of --pipeline-model-parallel-size 4; use 20 or 24",
    ),
    "layers with the embedding": (
        WITH_PP4 + "--account-for-embedding-in-pipeline-split",
        "--num-layers",
        "24 + 1 (--account-for-embedding-in-pipeline-split) is not a multiple",
        "use 23 or 27",
    ),
    "layers a chunk": (
        WITH_PP4 + "--num-layers-per-virtual-pipeline-stage 4",
        "--num-layers-per-virtual-pipeline-stage",
        "4 does not divide the 6 layers of a pipeline rank; use 2, 3 or 6",
    ),
    "chunks": (
        WITH_PP4 + "--num-virtual-stages-per-pipeline-rank 4",
        "--num-virtual-stages-per-pipeline-rank",
        "4 does not divide the 6 layers",
    ),
    "both ways of chunks": (
        WITH_PP4 + "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 3",
        "--num-virtual-stages-per-pipeline-rank",
        "exclude each other",
    ),
    "interleaving on one rank": (
        GPT + "--num-layers-per-virtual-pipeline-stage 12",
        "--num-layers-per-virtual-pipeline-stage",
        "needs --pipeline-model-parallel-size of 2 or more, not 1",
    ),
    "interleaving without overlap": (
        GPT
        + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
        "--num-virtual-stages-per-pipeline-rank",
        "of 3 or more, not 2",
    ),
    "sequence": (
        GPT.replace("--seq-length 1024", "--seq-length 1022") + "--context-parallel-size 2",
        "--seq-length",
        "1022 is not a multiple of 2 x --context-parallel-size 2 = 4; use 1020 or 1024",
    ),
    "heads": (
        GPT.replace("heads 16", "heads 4") + "--tensor-model-parallel-size 8",
        "--num-attention-heads",
        "4 is not a multiple of --tensor-model-parallel-size 8; use --tensor-model-parallel-size 2 or 4",
    ),
    "groups": (
        GPT.replace("heads 16 ", "heads 24 ").replace("1024 --num-a", "1536 --num-a")
        + LLAMA_FLAGS
        + "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 6",
        "--num-query-groups",
        "6 is neither a multiple nor a divisor of --tensor-model-parallel-size 4",
    ),
    "sequence parallel": (GPT + "--sequence-parallel", "--sequence-parallel", "of 2 or more, not 1"),
    "experts": (
        GPT + "--num-experts 6 --expert-model-parallel-size 4",
        "--num-experts",
        "6 is not a multiple of --expert-model-parallel-size 4; use 4 or 8",
        "expert parallelism is not built yet",
    ),
    "no experts": (GPT + "--expert-model-parallel-size 2", "--expert-model-parallel-size", "needs --num-experts"),
    "gather": (
        GPT + "--overlap-param-gather",
        "--overlap-param-gather",
        "needs --use-distributed-optimizer and --overlap-grad-reduce",
    ),
    "gather without reduce": (
        GPT + "--overlap-param-gather --use-distributed-optimizer",
        "--overlap-param-gather",
        "needs --overlap-grad-reduce;",
    ),
    "tp overlap": (
        GPT + "--tensor-model-parallel-size 2 --tp-comm-overlap",
        "--tp-comm-overlap",
        "needs --sequence-parallel",
    ),
    "recomputation": (
        GPT + "--recompute-granularity full",
        "--recompute-granularity",
        "needs --recompute-method and --recompute-num-layers; use --recompute-method uniform",
    ),
    "method of selective": (
        GPT + "--recompute-granularity selective --recompute-method uniform",
        "--recompute-method",
        "of --recompute-granularity full",
    ),
    "layers of selective": (
        GPT + "--recompute-activations --recompute-num-layers 1",
        "--recompute-num-layers",
        "not of selective; leave it out",
    ),
    "precisions": (GPT + "--fp16 --bf16", "--fp16", "exclude each other"),
    "positions": (
        GPT.replace("--max-position-embeddings 1024", "--max-position-embeddings 512"),
        "--max-position-embeddings",
        "512 is less than --seq-length 1024; use 1024 or more",
    ),
    "width": (GPT.replace("heads 16", "heads 12"), "--hidden-size", "1024 is not a multiple", "use 1020 or 1032"),
    "ramp by iterations": (GPT + "--rampup-batch-size 16 16 100", "--rampup-batch-size", "use --train-samples instead"),
    "ramp of two": (
        GPT.replace(*SAMPLES) + "--rampup-batch-size 16 16",
        "--rampup-batch-size",
        "16 16 must be three integers",
    ),
    "save": (GPT + "--save runs/a", "--save", "needs --save-interval"),
    "kept": (
        GPT + "--save-interval 100 --save-retain-interval 250",
        "--save-retain-interval",
        "250 is not a multiple of --save-interval 100; use 200 or 300",
    ),
    "least learning rate": (GPT + "--min-lr 1", "--min-lr", "1.0 must be at most --lr 0.0001"),
    "two lengths": (GPT + "--train-samples 100", "--train-samples", "exclude each other"),
    "warm-up of samples": (GPT + "--lr-warmup-samples 64", "--lr-warmup-samples", "use --lr-warmup-iters"),
    "two warm-ups": (
        GPT + "--lr-warmup-iters 64 --lr-warmup-fraction 0.1",
        "--lr-warmup-fraction",
        "--lr-warmup-iters exclude each other",
    ),
    # What parallax does not have
    "a2a": (GPT + "--context-parallel-size 2 --cp-comm-type a2a", "--cp-comm-type", "a2a:", "use p2p or allgather"),
    "experts alone": (GPT + "--num-experts 8", "--num-experts", "expert parallelism is not built yet"),
    "router": (GPT + "--moe-router-topk 2", "--moe-router-topk", "expert parallelism is not built yet"),
    "FSDP": (GPT + "--use-torch-fsdp2", "--use-torch-fsdp2", "not built yet; use --use-distributed-optimizer"),
    "untied GPT": (
        GPT + "--untie-embeddings-and-output-weights",
        "--untie-embeddings-and-output-weights",
        "one matrix for embedding and output",
    ),
    "grouped GPT": (
        GPT + "--group-query-attention --num-query-groups 4",
        "--group-query-attention",
        "as many key/value heads as heads",
    ),
    "a mixture of families": (GPT + "--swiglu", "--swiglu", "is in no file of models/", "--normalization RMSNorm"),
    "an explicit contradiction": (
        GPT + LLAMA_FLAGS.replace("RMSNorm", "LayerNorm"),
        "--position-embedding-type",
        "with --normalization LayerNorm is in no file",
    ),
    "relative positions": (
        GPT + "--position-embedding-type relative",
        "--position-embedding-type",
        "use rope or learned_absolute",
    ),
    "decay": (GPT + "--lr-decay-style WSD", "--lr-decay-style", "use constant, linear or cosine"),
    "optimizer": (GPT + "--optimizer muon", "--optimizer", "AdamW alone"),
    "paths without weights": (GPT + "--data-path a b", "--data-path", "use weight path"),
    "split": (GPT + "--data-path a --split 0,1,0", "--split", "training data"),
    "two sources": (GPT + "--data-path a --mock-data", "--mock-data", "exclude each other"),
    "another script": (GPT.replace("pretrain_gpt", "pretrain_bert"), "pretrain_bert.py", "use pretrain_gpt.py"),
    # What is no command line of Megatron-LM
    "unknown": (
        GPT + "--tensor-parallel-size 2",
        "--tensor-parallel-size",
        "not a known flag",
        "--tensor-model-parallel",
    ),
    "unknown to torchrun": (GPT.replace("torchrun", "torchrun --nnode 2"), "--nnode", "of torchrun", "use --nnodes"),
    "no integer": (GPT + "--seed x", "--seed", "x: it takes an integer; use for example 1234"),
    "no value": (GPT + "--seed", "--seed", "it takes an integer"),
    "no choice": (GPT + "--normalization Layer", "--normalization", "Layer: it takes LayerNorm or RMSNorm"),
    "a value of a switch": (GPT + "--bf16=1", "--bf16", "takes no value"),
    "a word too many": (GPT + "--bf16 yes", "yes", "after --bf16 belongs to no flag"),
    "missing": (GPT.replace("--num-layers 24", ""), "--num-layers", "is missing"),
    "zero": (GPT + "--tensor-model-parallel-size 0", "--tensor-model-parallel-size", "must be at least 1"),
    "elastic nodes": (GPT.replace("torchrun", "torchrun --nnodes 1:4"), "--nnodes", "use their number"),
    "a word for devices": (GPT.replace("node 8", "node gpu"), "--nproc_per_node", "use the number of its GPUs"),
    # What the run file refuses
    "tp over nodes": (
        GPT.replace("torchrun", "torchrun --nnodes 2") + "--tensor-model-parallel-size 16",
        "parallel.tp",
    ),
    "more stages than layers": (
        GPT.replace("--num-layers 24", "--num-layers 6") + "--pipeline-model-parallel-size 8 "
        "--decoder-last-pipeline-num-layers 1",
        "parallel.pp",
        "more than model.layers = 6",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str):
    text, flag, *parts = REFUSALS[name]
    line = refused(text)[flag]
    assert line.startswith(flag)
    for part in parts:
        assert part in line


def test_all_refusals_at_once(capsys: pytest.CaptureFixture):
    text = GPT.replace("size 64", "size 60") + "--nonsense --swiglu --num-experts 8 --sequence-parallel"
    assert main(["translate", text]) == 2
    out, err = capsys.readouterr()
    flags = {line.split()[1] for line in err.splitlines()}
    assert (out, flags) == (
        "",
        {"--global-batch-size", "--nonsense", "--swiglu", "--num-experts", "--sequence-parallel"},
    )


# Every flag


@pytest.mark.parametrize("table", [IGNORED, DEVIATES, REFUSED], ids=["ignored", "deviates", "refused"])
def test_no_flag_is_in_two_tables(table: dict[str, str]):
    names = [word.partition("=")[0] for names in table.values() for word in names.split()]
    assert len(names) == len(set(names))
    others = [flag.name for flag in MAPPED]
    others += [
        w.partition("=")[0]
        for t in (IGNORED, DEVIATES, REFUSED)
        if t is not table
        for n in t.values()
        for w in n.split()
    ]
    assert not set(names) & set(others)


VALUES = {"an integer": "2", "a number": "0.5", "a word": "x", "words": "p2p", "nothing": ""}


@pytest.mark.parametrize("family", ["", LLAMA_FLAGS], ids=["gpt", "llama"])
def test_each_flag_ends_in_one_table(family: str, monkeypatch: pytest.MonkeyPatch):
    """On top of a line that is translated, which a refused flag may bring to a halt."""
    monkeypatch.setattr("parallax.translate.translate.check_model", lambda *_: [])
    for flag in FLAGS.values():
        value = flag.choices[0] if flag.choices else VALUES[flag.takes]
        found = translate(f"{GPT} {family} --{flag.name} {value}".strip())
        tables = [f"--{flag.name}" in table for table in (found.mapped, found.ignored, found.refused)]
        if not found.refused or flag.outcome == "refused":
            assert sum(tables) == 1, (flag.name, tables)
        if flag.outcome != "mapped":
            assert found.refused.keys() == ({f"--{flag.name}"} if tables[2] else set()), flag.name
        assert f"--{flag.name}" not in found.defaults


def test_torchrun_options_are_ignored_by_reason(tmp_path: Path):
    names = [name for name in TORCHRUN_OPTIONS if name not in ("nnodes", "nproc-per-node", "m", "r", "t")]
    words = [f"--{name.replace('-', '_')}" + "=1" * (TORCHRUN_OPTIONS[name].takes != "nothing") for name in names]
    found, _ = translated(GPT.replace("torchrun", f"torchrun {' '.join(words)}"), tmp_path)
    assert {word.partition("=")[0] for word in words} <= found.ignored.keys()


def test_load_of_what_is_saved_is_going_on(tmp_path: Path):
    found, _ = translated(GPT + "--save runs/a --save-interval 5 --load runs/a", tmp_path)
    assert "--resume" in found.ignored["--load"] and not [what for what in found.deviations if "--load" in what]


def test_repeated_flags_are_said(tmp_path: Path):
    found, _ = translated(GPT + "--lr 5e-5", tmp_path)
    assert found.ignored["--lr 0.0001"] == "--lr comes again later, and the last one counts"
    assert found.mapped["--lr"] == ["optimizer.learning_rate"]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--attention-dropout 0.2 --hidden-dropout 0", "--attention-dropout 0.2: parallax has no dropout"),
        ("--fp16", "--fp16: parallax has no float16"),
        ("--load ckpt", "weights of Megatron-LM are not read"),
        ("--fp8-format hybrid", "no float8"),
        ("--init-method-std 0.01", "standard deviation of 0.02"),
        ("--lr-decay-iters 400", "to the last step, 500, not to 400"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "recomputes every layer"),
        (LLAMA_FLAGS.replace("--disable-bias-linear", ""), "no --disable-bias-linear"),
    ],
)
def test_deviations_are_named(flags: str, part: str, tmp_path: Path):
    found, _ = translated(GPT + flags, tmp_path)
    assert [what for what in found.deviations if part in what]


def test_flags_at_the_value_of_parallax_do_not_deviate(tmp_path: Path):
    flags = "--attention-dropout 0.0 --hidden-dropout 0 --init-method-std 0.02 --lr-decay-iters 500 --optimizer adam"
    found, _ = translated(GPT + flags, tmp_path)
    assert found.deviations == []


def test_a_vocabulary_that_padding_alone_tells_from_a_preset(tmp_path: Path):
    text = LLAMA3_8B.replace("parallel-size 2", "parallel-size 4") + "--vocab-size 128256"
    found, config = translated(text, tmp_path)
    assert config.model.name == "llama3-8b" and not config.model.overrides
    assert [what for what in found.deviations if "128,256 to 128,512" in what]  # 251 x 512


def test_another_mesh(tmp_path: Path):
    _, config = translated(GPT, tmp_path, mesh="a100-80gb")
    assert config.mesh.name == "a100-80gb"
    with pytest.raises(ConfigError, match="h100-sxm"):
        translate(GPT, mesh="h100-smx")


# The shell

SCRIPT = r"""#!/bin/bash
# --num-layers 3 is a comment
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINTS=$1 #<path>
HOST=$(hostname)
if [ ! -d "$CHECKPOINTS" ]; then
    mkdir -p $CHECKPOINTS
fi

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES # not 4
    # --nnodes 8
    --master_addr localhost
)
MODEL_ARGS="
    --num-layers 24 \
    --hidden-size $(( (4 + 4) * 128 )) --num-attention-heads ${HEADS:-16}
    --seq-length 1024 --max-position-embeddings 1024
"
MODEL_ARGS+=" --micro-batch-size 1"
TRAINING=(--global-batch-size ${WORLD_SIZE} --train-iters 10)
TRAINING+=(--lr 1e-4 '--bf16')

cd /somewhere && torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    $MODEL_ARGS ${TRAINING[@]} \
    --save "$CHECKPOINTS/a b" --save-interval 5 2>&1 | tee log.txt
echo "done"
"""


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.sh").write_text(SCRIPT)
    monkeypatch.setenv("NNODES", "4")
    written = tmp_path / "run.toml"
    assert main(["translate", str(tmp_path / "train.sh"), str(tmp_path / "saved"), "-o", str(written)]) == 0
    out, err = capsys.readouterr()
    assert out == f"wrote {written}\n" and "--lr → optimizer.learning_rate" in err
    config = resolve(written).config
    assert (config.devices, config.train.global_batch_size, config.model.overrides["width"]) == (32, 32, 1024)
    assert config.log.dir == str(tmp_path / "saved" / "a b") and config.train.precision == "bfloat16"


def test_a_script_is_read_as_bash_reads_it(tmp_path: Path):
    """bash itself, with a torchrun that prints its words."""
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    script = SCRIPT.replace("cd /somewhere && ", "").replace("| tee log.txt", "").replace('echo "done"', "")
    (tmp_path / "train.sh").write_text(script)
    done = subprocess.run(
        ["bash", "train.sh", "c k"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HEADS": "32"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ["torchrun", *done.stdout.splitlines()] == training_command(script, ["c k"], {"HEADS": "32"})


def test_commands_that_do_not_train_are_passed_over():
    script = "python prepare.py --in $UNSET\npython prepare.py --in x\ntorchrun pretrain_gpt.py --num-layers 2\nrm $Y"
    assert training_command(script) == ["torchrun", "pretrain_gpt.py", "--num-layers", "2"]


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("torchrun --nnodes $NODES pretrain_gpt.py --bf16", "$NODES has no value; set it in the script"),
        ("torchrun pretrain_gpt.py --save $1", "$1 has no value; give the script's arguments"),
        ("N=$(nproc)\ntorchrun --nproc_per_node $N pretrain_gpt.py --bf16", '"$(nproc)" is the output of a program'),
        ("N=8\nif x; then\nN=4\nfi\ntorchrun --nnodes $N pretrain_gpt.py --bf16", "$N is set under a condition"),
        ("[ -z $N ] && N=4\ntorchrun --nnodes $N pretrain_gpt.py --bf16", "$N is set under a condition"),
        ("for i in 1 2; do\ntorchrun pretrain_gpt.py --bf16\ndone", "inside of a condition or a loop"),
        ("torchrun pretrain_gpt.py --save 'x", "No closing quotation"),
        ("torchrun a.py --num-layers 1\ntorchrun b.py --num-layers 2", "there are 2 commands that train"),
        ("echo hello there", "holds no command that trains"),
    ],
)
def test_scripts_that_cannot_be_followed(script: str, part: str):
    with pytest.raises(ConfigError, match=re.escape(part)):
        training_command(script)


# The verb


def test_json(capsys: pytest.CaptureFixture, tmp_path: Path):
    assert main(["translate", GPT + "--seed 7 --wandb-project x", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"run_toml", "devices", "mapped", "defaults", "ignored", "refused", "deviations"}
    assert found["mapped"]["--seed"] == ["train.seed"] and "--wandb-project" in found["ignored"]
    (tmp_path / "run.toml").write_text(found["run_toml"])
    assert load(tmp_path / "run.toml").train.seed == 7
    assert main(["translate", GPT + "--num-experts 8", "--json"]) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["run_toml"] is None and [*found["refused"]] == ["--num-experts"]
    assert err == f"error: {found['refused']['--num-experts']}\n"


def test_stdout_is_the_run_file_alone(capsys: pytest.CaptureFixture, tmp_path: Path):
    assert main(["translate", GPT + "--data-path 0.5 d/a 0.5 d/b"]) == 0
    out, err = capsys.readouterr()
    (tmp_path / "run.toml").write_text(out)
    load(tmp_path / "run.toml")
    assert 'source = {"d/a" = 0.5, "d/b" = 0.5}' in out and "# --data-path" in out
    assert "weight_decay = 0.01" in out and "# default of Megatron-LM" in out
    assert "deviates" in err and "ignored" not in err


def test_sources_are_relative_to_the_file_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    assert main(["translate", GPT + "--data-path d/a --save runs/a --save-interval 1", "-o", "configs/run.toml"]) == 0
    config = load("configs/run.toml")
    assert (config.data.source, config.log.dir) == (str(tmp_path / "d" / "a"), "runs/a")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["no_such.sh"], '"no_such.sh" is no file and no command line'),
        ([GPT, "more"], '"more" follows a command line'),
        ([GPT, "-o", "no/such/run.toml"], "-o no/such/run.toml: the folder no/such does not exist"),
        ([GPT, "-o", "."], "is a folder and cannot be written"),
        ([GPT, "--mesh", "h100"], "mesh.name"),
    ],
)
def test_wrong_options(words: list[str], part: str, capsys: pytest.CaptureFixture):
    assert main(["translate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and part in err and len(err.splitlines()) == 1


def test_nothing_is_written_where_something_is_refused(tmp_path: Path):
    (tmp_path / "run.toml").write_text("before")
    assert main(["translate", GPT + "--num-experts 8", "-o", str(tmp_path / "run.toml")]) == 2
    assert (tmp_path / "run.toml").read_text() == "before" and len([*tmp_path.iterdir()]) == 1


def test_no_jax_where_the_layout_is_refused():
    code = f"import sys; from parallax.cli import main; main(['translate', {GPT + '--num-experts 8'!r}]); "
    code += "print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n"
