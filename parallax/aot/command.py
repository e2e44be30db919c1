"""The verb `parallax compile`: the train step through the real compiler, for a pod that is not there. No jax."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

from parallax.aot.builder import BuildError, build
from parallax.aot.report import read, to_json
from parallax.aot.show import report_view
from parallax.aot.target import missing, topology_name
from parallax.config import ConfigError, show, suggest
from parallax.kernels import kernel_of
from parallax.layout import AXES
from parallax.machine import machine_names
from parallax.output import output_problems, write_whole
from parallax.plan.estimate import Estimate, Job, estimate
from parallax.plan.explain import describe
from parallax.plan.search import Request, search
from parallax.plan.show import print_view
from parallax.text import size
from parallax.validate import Resolved, resolve

EXAMPLE = """\
examples:
  parallax compile run.toml
  parallax compile run.toml --target tpu-v5p parallel.tp=2 parallel.dp=4
  parallax compile examples/pods/llama3-70b-64-h100.toml --json --hlo step.hlo

exit status: 0 done, 1 it does not fit or the compiler failed, 2 the input is wrong
"""
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Build the train step of a run file with XLA for its machine, which need not be there."
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run_file", metavar="RUN.toml", help="the run file (docs/config.md)")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="keys to change: parallel.tp=4")
    parser.add_argument(
        "--target", metavar="NAME", help="a machine of meshes/ to build for, in place of the run file's"
    )
    parser.add_argument("--hlo", metavar="FILE", help="write the scheduled program's text")
    parser.add_argument("--save", metavar="FILE", help="keep the serialized executable")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """→ exit status. Raises ConfigError where the input is wrong, OSError where a file cannot be written."""
    resolved, overrides = _read(args)
    job = Job(resolved.shape, resolved.machine, resolved.config.parallel, resolved.config.train)
    predicted = estimate(job)
    try:
        built = build(args.run_file, overrides, resolved.machine, args.save)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.needs_bytes:
            print(f"error: {_does_not_fit(predicted, error.needs_bytes)}", file=sys.stderr)
        return FAILED
    if args.hlo:
        write_whole(Path(args.hlo), built.program)
    try:
        report = read(built, predicted, _blockwise(resolved))
    except ValueError as error:
        print(f"error: it is built, but its text could not be read: {error}", file=sys.stderr)
        return FAILED
    if args.json:
        print(json.dumps(to_json(report)))
    else:
        print_view(lambda _: report_view(report))
    if report.fits:
        return 0
    print(f"error: {_does_not_fit(predicted, built.peak_bytes)}", file=sys.stderr)
    return FAILED


def _read(args: argparse.Namespace) -> tuple[Resolved, list[str]]:
    """The run file for its target, every check passed, and the overrides that make it so."""
    outputs = {"--hlo": args.hlo, "--save": args.save}
    problems = output_problems(outputs, {"RUN.toml": args.run_file})
    overrides: list[str] = list(args.overrides)
    if args.target is not None:
        if args.target not in machine_names():
            use = suggest(args.target, [name for name in machine_names() if name != "cpu"])
            problems.append(f"--target {show(args.target)} is not a machine of meshes/; use {use}")
        overrides += [f"mesh.name={args.target}", 'mesh.file=""']
    if problems:
        raise ConfigError(problems)
    with contextlib.redirect_stdout(sys.stderr):  # a model file may print
        resolved = resolve(args.run_file, overrides)
    machine = resolved.machine
    if machine.platform == "cpu":
        raise ConfigError([f"mesh.name = {show(machine.name)} emulates its devices; use for example --target h100-sxm"])
    if lacks := missing(machine):
        raise ConfigError([f"--target {machine.name}: {lacks}"])
    topology_name(machine, resolved.config.devices)
    config = resolved.config
    schedule = config.parallel.schedule if config.parallel.schedule.endswith(".csv") else None
    inputs = {"model.file": config.model.file, "mesh.file": config.mesh.file, "parallel.schedule": schedule}
    if problems := output_problems(outputs, inputs):
        raise ConfigError(problems)
    return resolved, overrides


def _blockwise(resolved: Resolved) -> str | None:
    """Why attention does not run on the machine's own kernel, where that is so."""
    config = resolved.config
    isolated = config.data.isolate_documents
    return kernel_of(resolved.machine.platform, resolved.shape, config.parallel, config.train, isolated)[1]


def _does_not_fit(predicted: Estimate, needs_bytes: float) -> str:
    """By how much, which item to shrink, and the nearest layout that fits, were it underestimated as much."""
    job = predicted.job
    items = predicted.stages[0]
    largest = max(items, key=items.__getitem__)
    train = job.train
    request = Request(job.shape, job.machine, job.devices, train.seq_len, train.global_batch_size, train.precision)
    beyond = max(1.0, needs_bytes / predicted.peak_bytes)
    request = dataclasses.replace(request, headroom=1 - (1 - request.headroom) / beyond)
    same = search(dataclasses.replace(request, pins=_sizes(job))).best
    best = same or search(request).best
    use = (
        f"use {describe(best)}" if best else "no layout of so many devices fits; parallax plan finds how many would do"
    )
    return (
        f"it does not fit: {size(needs_bytes)} a device, {size(needs_bytes - job.machine.hbm_bytes)} more than the "
        f"{size(job.machine.hbm_bytes)} of {job.machine.name}; most is {largest}, {size(items[largest])}; "
        f"{use}"
    )


def _sizes(job: Job) -> dict[str, int]:
    return {axis: getattr(job.parallel, axis) for axis in AXES}
