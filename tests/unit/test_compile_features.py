"""Every feature that `train` has, built by the real compilers at a small size: each pair of them meets in some row."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path

import pytest

from parallax.aot.target import missing
from parallax.cli import main
from parallax.config import MeshChoice
from parallax.machine import load_machine
from parallax.schedule import make_schedule, to_csv

RUN = """
[model]
name = "{model}-tiny"
layers = {layers}
vocab_size = 515
[parallel]
schedule = "{schedule}"
zero = {zero}
[mesh]
name = "tpu-v5p"
[train]
steps = 10
seq_len = 512
global_batch_size = 16
remat = "{remat}"
[log]
dir = "runs/x"
"""
FEATURES = {
    "model": ("llama", "gpt"),
    "schedule": ("1f1b", "interleaved", "gpipe", "own.csv"),
    "layers": ("8", "7"),  # on two ranks, of one or two chunks: even, uneven
    "remat": ("full", "selective", "none"),
    "context": ("-", "ring", "all_gather"),
    "zero": ("1", "0"),
}
ROWS = [
    "llama 1f1b        8 full      -          1 dp=2 pp=2 tp=2",
    "gpt   1f1b        7 selective ring       0 pp=2 cp=2 tp=2",
    "llama 1f1b        7 none      all_gather 1 dp=2 pp=2 cp=2",
    "gpt   interleaved 8 full      ring       0 dp=2 pp=2 cp=2 virtual_stages=2",
    "llama interleaved 7 selective all_gather 1 pp=2 cp=2 tp=2 virtual_stages=2",
    "gpt   interleaved 7 none      -          0 dp=2 pp=2 tp=2 virtual_stages=2 sequence_parallel=false",
    "llama gpipe       7 full      all_gather 0 pp=2 cp=2 tp=2 sequence_parallel=false",
    "gpt   gpipe       8 selective -          1 dp=4 pp=2 skip_idle=true",
    "llama gpipe       8 none      ring       1 dp=2 pp=2 cp=2 data.isolate_documents=true",
    "gpt   own.csv     7 full      -          1 pp=2 tp=4",
    "llama own.csv     8 selective ring       1 dp=2 pp=2 cp=2 tp=2 model.tied=true",
    "gpt   own.csv     8 none      all_gather 0 dp=2 pp=2 cp=2",
    "llama 1f1b        8 full      -          0 dp=2 tp=4 train.micro_batch_size=2",  # more than its 2 key heads
]
SCALARS = 64  # bytes a step: the loss, the norm, flags


def features(row: str) -> dict[str, str]:
    return dict(zip(FEATURES, row.split(), strict=False))


def test_every_pair_of_features_meets_in_a_row():
    met = {frozenset(pair) for row in ROWS for pair in combinations(features(row).items(), 2)}
    wanted = {
        frozenset(((one, a), (other, b)))
        for one, other in combinations(FEATURES, 2)
        for a, b in product(FEATURES[one], FEATURES[other])
    }
    assert wanted <= met


def lacks(mesh: str) -> str | None:
    return missing(load_machine(MeshChoice(name=mesh)))


needs_tpu = pytest.mark.skipif(lacks("tpu-v5p") is not None, reason=f"NOT RUN: {lacks('tpu-v5p')}")
needs_gpu = pytest.mark.skipif(lacks("h100-sxm") is not None, reason=f"NOT RUN: {lacks('h100-sxm')}")
slow = pytest.mark.slow  # the plugin and its libraries are 2.5 GB: `make test` does not install them


@pytest.mark.parametrize(
    "mesh", [pytest.param("tpu-v5p", marks=needs_tpu), pytest.param("h100-sxm", marks=[slow, needs_gpu])]
)
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.newest] if "dp=2 pp=2 cp=2 tp=2" in row else []) for row in ROWS]
)
def test_builds(row: str, mesh: str, tmp_path: Path, monkeypatch, capsys):
    """And sends over each axis what the features ask for, and nothing else of any size."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # those of emulated devices
    feature, rest = features(row), dict(word.split("=") for word in row.split()[len(FEATURES) :])
    dp, pp, cp, tp = (int(rest.get(axis, 1)) for axis in ("dp", "pp", "cp", "tp"))
    Path("own.csv").write_text(to_csv(make_schedule("1f1b", pp, 1, 16 // dp)))
    Path("run.toml").write_text(RUN.format(**feature))
    if cp > 1:
        rest["context"] = feature["context"]
    keys = [f"{key if '.' in key else f'parallel.{key}'}={value}" for key, value in rest.items()]
    assert main(["compile", "run.toml", *keys, "--target", mesh, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    found: dict[str, set[str]] = {}
    for traffic in facts["collectives"]:
        if traffic["bytes"] > SCALARS:
            found.setdefault("·".join(traffic["axes"]), set()).add(traffic["kind"])

    expected: dict[str, set[str]] = {}
    replicas = "·".join(axis for axis, size in (("dp", dp), ("cp", cp)) if size > 1)
    vocabulary = "·".join(axis for axis, size in (("pp", pp), ("tp", tp)) if size > 1)
    if pp > 1:
        expected["pp"] = {"collective-permute", "all-reduce"}
    if tp > 1:
        parts = set() if "sequence_parallel" in rest else {"all-gather", "reduce-scatter"}
        expected["tp"] = parts | {"all-reduce"}  # and what is whole on all ranks
    if vocabulary:
        expected.setdefault(vocabulary, set()).add("all-reduce")
    if cp > 1:
        expected["cp"] = {"collective-permute"} if feature["context"] == "ring" else {"all-gather", "reduce-scatter"}
    if replicas:
        kinds = {"all-gather", "reduce-scatter"} if feature["zero"] == "1" else {"all-reduce"}
        expected.setdefault(replicas, set()).update(kinds)
        if feature["zero"] == "1" and mesh == "tpu-v5p":
            found[replicas].discard("all-reduce")  # of the odd vocabulary
    assert found == expected
    assert facts["fits"]
    blockwise = [line for line in facts["warnings"] if line.startswith("attention runs blockwise")]
    assert facts["warnings"] == blockwise and len(blockwise) == (feature["context"] == "ring")
