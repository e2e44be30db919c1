"""What a plan says of itself is true: every claim is made again here, by searches of what it names."""

from __future__ import annotations

import dataclasses
import re

import pytest

from parallax.config import MeshChoice, Model
from parallax.machine import load_machine
from parallax.model_files import load_model
from parallax.plan.explain import Step, describe, explain
from parallax.plan.search import Found, Request, layouts, search
from parallax.plan.shapes import SHAPES

H100 = load_machine(MeshChoice(name="h100-sxm"))
TPU = load_machine(MeshChoice(name="tpu-v5p"))


def request_of(name: str, devices: int, seq_len: int = 8192, batch: int = 512, **more) -> Request:
    shape = SHAPES.get(name) or load_model(Model(name=name))[1].shape()
    return Request(shape, more.pop("machine", H100), devices, seq_len, batch, **more)


def said(found: Found) -> list[str]:
    return [reason for step in explain(found) for reason in step.reasons]


def step_of(found: Found, word: str) -> Step:
    return next(step for step in explain(found) if word in step.question)


@pytest.mark.parametrize("headroom", [0.08, 0.3])
@pytest.mark.parametrize(("name", "devices"), [("llama3-70b", 64), ("llama3-8b", 8), ("mixtral-8x7b", 64)])
def test_with_so_much_memory_the_plan_is_what_is_said(name: str, devices: int, headroom: float):
    request = request_of(name, devices, headroom=headroom)
    found = search(request)
    assert found.best
    for step in explain(found):
        axis = re.match(r"(?:no: )?([a-z]+) ", step.answer)
        for line in step.reasons:
            if not (more := re.match(r"what would change it: with ([\d.]+) GiB more HBM a device( \(.*\))?, ", line)):
                continue
            hbm_bytes = request.machine.hbm_bytes + int(float(more[1]) * 2**30) + 1
            machine = dataclasses.replace(request.machine, hbm_bytes=hbm_bytes)
            best = search(dataclasses.replace(request, machine=machine)).best
            assert best and axis and line.endswith(describe(best))
            assert getattr(best.parallel, axis[1]) != getattr(found.best.parallel, axis[1])
            assert f"{1 - best.step_time_s / found.best.step_time_s:.1%} faster" in line
            if left := re.search(r"--headroom (\d+)", line):
                assert search(dataclasses.replace(request, headroom=int(left[1]) / 100)).best == best


def test_some_plan_says_what_would_change_it():
    assert any("GiB more HBM a device" in line for line in said(search(request_of("llama3-70b", 64))))


def test_what_is_not_tried_is_not_called_illegal():
    found = search(request_of("llama3-8b", 8, seq_len=1024, batch=8))
    (line,) = [line for line in said(found) if line.startswith("cp 2")]
    assert line == "cp 2 was not tried: context parallelism leaves each rank 1,024 tokens of a sequence or more"
    assert next(layouts(dataclasses.replace(found.request, pins={"cp": 2})), None)  # it is legal
    found = search(request_of("llama3-8b", 8, seq_len=128, batch=2**17))
    assert found.best and found.best.train.micro_batch_size == 16
    assert "micro batches beyond 16 were not tried" in said(found)
    found = search(request_of("llama3-70b", 64, seq_len=1024, batch=1, machine=TPU, pins={"pp": 4}))
    assert found.best and found.best.parallel.tp == 16 and "tp beyond 16 was not tried" in said(found)


def test_what_is_fixed_is_why():
    found = search(
        request_of("llama3-8b", 8, pins={"pp": 1, "dp": 4, "micro_batch_size": 2, "sequence_parallel": False})
    )
    lines = said(found)
    assert found.best and {found.best.parallel.tp, found.best.parallel.cp} == {1, 2}
    assert "the micro batch is fixed by the request" in lines
    assert any(line.startswith(("tp 4", "cp 4")) for line in lines)
    assert not any("sequence parallelism comes with it" in line for line in lines)
    assert any(line.endswith("no such layout of 8 devices is legal with what is fixed") for line in lines)


def test_fully_sharded_weights():
    experts = said(search(request_of("mixtral-8x7b", 64)))
    assert any(line.startswith("fully sharded weights") and "were not priced" in line for line in experts)
    for name, devices in [("llama3-8b", 8), ("llama3-8b", 64), ("llama3-70b", 64)]:
        found = search(request_of(name, devices))
        assert found.best
        p = found.best.parallel
        own = "·".join(f"{axis}{n}" for axis in ("dp", "cp", "tp") if (n := getattr(p, axis)) > 1)
        for line in said(found):
            if line.startswith("fully sharded weights") and p.pp == 1:
                assert f": {own} without" not in line


def test_numbers_are_not_rounded_into_something_else():
    found = search(request_of("llama3-8b", 8, batch=3, pins={"pp": 2, "micro_batch_size": 1, "dp": 1}))
    assert any(line.startswith("m = 3 is 1.5 times the pipeline's 2 ranks") for line in said(found))
    found = search(request_of("llama3-8b", 8, headroom=0.005))
    assert any("(0.5% headroom)" in line for line in said(found))
