"""The verb `parallax plan`: choose a layout for a model on a machine, and say why. No jax."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallax.config import INT_MAX, ConfigError, MeshChoice, Model
from parallax.machine import PRECISIONS
from parallax.output import output_problems, write_all
from parallax.plan.estimate import GIB, estimate, layout_facts
from parallax.plan.explain import Step, describe, explain, reasons_of
from parallax.plan.guide import guide_line
from parallax.plan.page import plan_page
from parallax.plan.request import cut, read_request, tokens_of
from parallax.plan.runfile import FIRST_LINE, run_file, steps_for
from parallax.plan.search import (
    HEADROOM,
    MOST_DEVICES_FOUND,
    Candidate,
    Found,
    Request,
    device_days,
    lacking_gib,
    search,
    smallest_count,
    smallest_that_fits,
    smallest_that_is_fast,
    training_days,
)
from parallax.plan.show import plan_markdown, plan_view, print_view

EXAMPLE = """\
examples:
  parallax plan --model llama3-70b --mesh h100-sxm --devices 64 --seq-len 8192 --global-batch-size 512 -o run.toml
  parallax plan --model llama3-70b --mesh tpu-v5p --devices auto --seq-len 8192 --global-batch-size 512
  parallax plan --model llama3-70b --target-days 30 --tokens 2T --seq-len 8192 --global-batch-size 2048
  parallax plan --model llama3-8b --devices 8 --seq-len 8192 --global-batch-size 512 parallel.pp=1 --html plan.html

exit status: 0 done, 1 it fits nowhere, 2 the input is wrong
"""
FITS_NOWHERE = 1
MOST_CANDIDATES = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Choose a layout for a model on a machine: fit first, then fast, each choice with its reason."
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = parser.add_argument
    option(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="keys to fix: parallel.tp=4, train.remat=full, model.layers=16",
    )
    option("--model", metavar="NAME", help="a preset of a model file: llama3-70b, gpt-1t, mixtral-8x7b, ...")
    option("--model-file", metavar="FILE", help="your own model file")
    option("--mesh", metavar="NAME", default="h100-sxm", help="a machine of meshes/ (default: %(default)s)")
    option("--mesh-file", metavar="FILE", help="your own machine file")
    option("--devices", metavar="N", help="devices; auto: as few as fit")
    option("--seq-len", metavar="S", help="tokens in a sequence")
    option("--global-batch-size", metavar="B", help="sequences in a step")
    option("--precision", choices=PRECISIONS, default="bfloat16", help="(default: %(default)s)")
    option(
        "--headroom",
        metavar="PERCENT",
        default=f"{100 * HEADROOM:g}",
        help="of the memory, to leave free (default: %(default)s)",
    )
    option("--tokens", metavar="N", help="tokens to train on: 2T, 300B")
    option("--target-days", metavar="DAYS", help="find as few devices as train on --tokens in so many days")
    option("--top", metavar="N", type=int, default=8, help="layouts to show (default: %(default)s)")
    option("-o", "--output", metavar="FILE", help="write a run file with the choice and its reasons")
    option("--markdown", metavar="FILE", help="write the plan as Markdown")
    option("--html", metavar="FILE", help="write a self-contained page with pictures")
    option("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """→ exit status. Raises ConfigError where the request is wrong, OSError where a file cannot be written."""
    tokens, days = _targets(args)
    with contextlib.redirect_stdout(sys.stderr):  # a model file may print
        request, model, mesh, notes = read_request(args)
    if tokens and (steps := steps_for(request, tokens)) > INT_MAX:
        most = INT_MAX * request.global_batch_size * request.seq_len
        rule = f"are {steps:,} steps, and a run has at most {INT_MAX:,}"
        raise ConfigError([f"--tokens {args.tokens} {rule}; use {most:.3g} or less, or a larger batch"])
    found = _find(request, tokens, days)
    if isinstance(found, str):
        print(f"error: {found}", file=sys.stderr)
        return FITS_NOWHERE
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    best = found.best
    assert best is not None
    steps, made = explain(found), estimate(best.job(found.request))
    guide = guide_line(found)
    lines = [*_days_lines(found, tokens, days), *_nearest_lines(found), *([guide] if guide else [])]
    files = {
        args.output: lambda: run_file(found.request, best, model, mesh, steps, tokens),
        args.markdown: lambda: plan_markdown(found, made, steps, lines, args.top),
        args.html: lambda: plan_page(found, made, steps),
    }
    write_all({Path(name): text() for name, text in files.items() if name})
    if args.json:
        print(json.dumps(_to_json(found, steps, guide, tokens, model, mesh)))
        return 0
    print_view(lambda width: plan_view(found, made, steps, lines, args.top, width))
    for name in filter(None, files):
        print(f"wrote {name}")
    return 0


def _targets(args: argparse.Namespace) -> tuple[float | None, float | None]:
    """Tokens to train on and days to do it in. Raises ConfigError with every problem of options that stand alone."""
    outputs = {"-o": args.output, "--markdown": args.markdown, "--html": args.html}
    problems = output_problems(outputs, {"--model-file": args.model_file, "--mesh-file": args.mesh_file})
    if not problems and args.output and not _is_ours(Path(args.output)):
        problems.append(f"-o {args.output} is there and not a plan's; remove it, or use another name")
    tokens = days = None
    if args.tokens is not None:
        try:
            tokens = tokens_of(args.tokens)
        except ValueError as error:
            problems.append(str(error))
    if args.target_days is not None:
        try:
            days = float(args.target_days)
        except ValueError:
            days = -1.0
        if not 0 < days < 1e6:
            problems.append(
                f"--target-days {cut(args.target_days)} must be a number of days greater than 0; use for example 30"
            )
        if args.tokens is None:
            problems.append("--target-days needs --tokens, how many to train on; use for example --tokens 2T")
        if args.devices not in (None, "auto"):
            problems.append(f"--target-days finds the devices, and --devices {args.devices} gives them; leave one out")
        args.devices = "auto"
    elif args.devices is None:
        problems.append("--devices is missing; use for example --devices 64 or auto")
        args.devices = "auto"
    if not args.model:
        problems.append("--model is missing; use for example --model llama3-70b")
    if args.top < 1:
        problems.append(f"--top {args.top} must be at least 1; use 1 or more")
    if problems:
        raise ConfigError(problems)
    return tokens, days


def _is_ours(path: Path) -> bool:
    """Whether a run file may be written there: nothing is, or what an earlier plan wrote."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(len(FIRST_LINE)) == FIRST_LINE
    except FileNotFoundError:
        return True


def _find(request: Request, tokens: float | None, days: float | None) -> Found | str:
    """What fits, or why nothing does."""
    if request.devices:
        found = search(request)
        return found if found.best else _fits_nowhere(found)
    needs = ""
    if days is not None and tokens is not None:
        found = smallest_that_is_fast(request, tokens, days)
        wanted = f"trains on {tokens:.3g} tokens in {days:g} days"
        spent = device_days(request, tokens)
        if spent / days > MOST_DEVICES_FOUND:
            needs = f"; that is {spent:,.0f} device-days at full peak, {spent / days:,.0f} devices for {days:g} days"
    else:
        found = smallest_that_fits(request)
        wanted = "fits"
    name, machine = request.shape.name, request.machine.name
    use = "more days, or fewer tokens" if needs else "a larger batch, or shorter sequences"
    return found or (
        f"no number of {machine} of those tried up to {MOST_DEVICES_FOUND:,} {wanted}, with {name}, sequences of "
        f"{request.seq_len:,} and a batch of {request.global_batch_size:,}{needs}; use {use}"
    )


def _fits_nowhere(found: Found) -> str:
    """What is in the way, and the smallest number of devices that would do."""
    request = found.request
    lean = found.too_large[0]
    items = estimate(lean.job(request)).stages[0]
    largest = sorted(items.items(), key=lambda item: -item[1])[:2]
    way = " and ".join(f"{name} {size / GIB:.1f} GiB" for name, size in largest)
    fixed = " with what is fixed" if request.pins else ""
    use = f"no number of devices of those tried up to {MOST_DEVICES_FOUND:,} would do{fixed}"
    if count := smallest_count(request):
        fewer = count < request.devices
        use = f"use --devices {count}, " + (
            "on which more layouts are legal" if fewer else f"the fewest that would do of the sizes tried{fixed}"
        )
    return (
        f"{request.shape.name} fits nowhere on {request.devices} x {request.machine.name}: the leanest layout, "
        f"{describe(lean)}, needs {lean.memory_bytes / GIB:.1f} GiB and {request.budget_bytes / GIB:.1f} are planned "
        f"with ({100 * request.headroom:g}% headroom); in the way are {way}; {use}"
    )


def _days_lines(found: Found, tokens: float | None, days: float | None) -> list[str]:
    """How long the tokens take and, where the devices were to be found, on how many."""
    request = found.request
    if tokens is None:
        return []
    took = training_days(found, tokens)
    wanted = f", of {days:g} that are there" if days else ""
    return [f"{request.devices:,} devices: {tokens:.3g} tokens in {took:,.1f} days{wanted}"]


def _nearest_lines(found: Found) -> list[str]:
    nearest, best = found.nearest_infeasible(), found.best
    if nearest is None or best is None:
        return []
    lacks, change = lacking_gib(found.request, nearest), 1 - nearest.step_time_s / best.step_time_s
    if change < 0.0005 or lacks > found.request.budget_bytes / GIB / 4:
        return []
    over = f"{lacks:.1f} GiB over what is planned with"
    return [f"nearest that does not fit: {describe(nearest)}, {over}, would be {change:.1%} faster"]


def _to_json(
    found: Found, steps: Sequence[Step], guide: str | None, tokens: float | None, model: Model, mesh: MeshChoice
) -> dict[str, Any]:
    """What `--json` prints: `candidates` are the best configuration of each layout, the choice first."""
    request, nearest = found.request, found.nearest_infeasible()
    return {
        "model": request.shape.name,
        "overrides": model.overrides,
        "parameters": request.shape.parameters,
        "mesh": mesh.file or mesh.name,
        "devices": request.devices,
        "headroom": request.headroom,
        "hbm_gib": request.machine.hbm_bytes / GIB,
        "priced": len(found.fitting) + len(found.too_large),
        "days": training_days(found, tokens) if tokens else None,
        "candidates": [_candidate(candidate, found) for candidate in found.layouts()[:MOST_CANDIDATES]],
        "nearest_infeasible": nearest and {**_candidate(nearest, found), "lacking_gib": lacking_gib(request, nearest)},
        "guide": guide,
        "steps": [{"question": s.question, "answer": s.answer, "reasons": list(s.reasons)} for s in steps],
    }


def _candidate(candidate: Candidate, found: Found) -> dict[str, Any]:
    job = candidate.job(found.request)
    tokens_per_s = job.tokens / candidate.step_time_s
    return {
        **layout_facts(job),
        "step_time_s": candidate.step_time_s,
        "tokens_per_s": tokens_per_s,
        "mfu": estimate(job).mfu,
        "memory_gib": candidate.memory_bytes / GIB,
        "reasons": reasons_of(candidate, found),
    }
