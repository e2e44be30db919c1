"""The flags of a command line as keys of a run file: sizes, layout, training, data.

Each flag ends in one of three tables, mapped, ignored or refused; each key that a flag would have set and did not is
under `defaults`, and what the run will do in another way under `deviations`.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parallax.batch_size import samples_after
from parallax.config import SECTIONS, Train, keys_of, show
from parallax.translate.command_line import CommandLine
from parallax.translate.refusals import virtual_stages

OF_MEGATRON = "default of Megatron-LM"
CHOSEN = "chosen by translate"
DEFAULT_STEPS = 1000


@dataclass
class Draft:
    """A translation being made. `keys`: by dotted key its value and where that came from."""

    line: CommandLine
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    mapped: dict[str, list[str]] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    deviations: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, *flags: str, default: str = OF_MEGATRON) -> None:
        """A key, from those of `flags` that were given; from none of them: `default` says where it comes from, under
        the name of the first."""
        self.use(key, *flags)
        given = [f"--{name}" for name in flags if name in self.line.given]
        if not given and value != _usual(key):
            self.defaults[f"--{flags[0]}"] = f"{key} = {show(value)}; {default}"
        self.keys[key] = value, ", ".join(given) or default

    def use(self, key: str, *flags: str) -> None:
        """Flags that a key's value comes from, too."""
        for name in flags:
            if name in self.line.given and key not in self.mapped.setdefault(f"--{name}", []):
                self.mapped[f"--{name}"].append(key)

    def ignore(self, name: str, reason: str, deviates: str = "") -> None:
        """A flag that was given; nothing of one that was not."""
        if name in self.line.given:
            self.ignored[f"--{name}"] = reason
            if deviates:
                self.deviations.append(deviates)

    def refuse(self, *problems: str) -> None:
        """Lines that begin with the flag, or with the key of a run file."""
        for line in problems:
            flag = line.split()[0].rstrip(":")
            self.refused[flag] = f"{self.refused[flag]}; {line}" if flag in self.refused else line


def _usual(key: str) -> Any:
    """The run file's own default; None of the model's sizes."""
    section, _, name = key.partition(".")
    return next((f.default for f in keys_of(SECTIONS[section]) if f.name == name), None)


def map_layout(draft: Draft) -> None:
    line = draft.line
    tp, cp = line.get("tensor-model-parallel-size"), line.get("context-parallel-size")
    draft.keys["parallel.dp"] = line.data_parallel, ", ".join(line.launched) or "one device"
    for word in line.launched:
        draft.mapped[word] = ["parallel.dp"]
    draft.set("parallel.pp", line.get("pipeline-model-parallel-size"), "pipeline-model-parallel-size")
    draft.set("parallel.cp", cp, "context-parallel-size")
    draft.set("parallel.tp", tp, "tensor-model-parallel-size")
    for name in ("expert-model-parallel-size", "num-experts"):
        if (line.get(name) or 0) > (name != "num-experts"):
            rule = "expert parallelism is not built yet; leave the flags of experts out"
            draft.refuse(f"--{name} {line.get(name)}: {rule}")
        else:
            draft.ignore(name, "a model without experts")
    v = virtual_stages(line)
    chunks = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    draft.set("parallel.virtual_stages", v, *chunks)
    draft.set("parallel.schedule", "interleaved" if v > 1 else "1f1b", *chunks)
    draft.set("parallel.sequence_parallel", line.get("sequence-parallel"), "sequence-parallel")
    draft.set("parallel.zero", int(line.get("use-distributed-optimizer")), "use-distributed-optimizer")
    kinds = set(line.get("cp-comm-type"))
    if cp == 1:
        draft.ignore("cp-comm-type", "there is no context parallelism")
    elif kinds <= {"p2p"} or kinds == {"allgather"}:
        draft.set("parallel.context", "all_gather" if kinds == {"allgather"} else "ring", "cp-comm-type")
    else:
        rule = "parallax shares attention by ring or all-gather, the same in every layer; use p2p or allgather"
        draft.refuse(f"--cp-comm-type {' '.join(line.get('cp-comm-type'))}: {rule}")


def map_training(draft: Draft) -> None:
    line = draft.line
    batch, steps = line.get("global-batch-size"), line.get("train-iters")
    micro = line.get("micro-batch-size")
    each = f"{OF_MEGATRON}: --micro-batch-size x data parallel"
    full = batch if batch is not None else micro * line.data_parallel
    draft.set("train.global_batch_size", full, "global-batch-size", default=each)
    draft.set("train.micro_batch_size", micro, "micro-batch-size")
    draft.set("train.seq_len", line.get("seq-length"), "seq-length")
    if ramp := [int(word) for word in line.get("rampup-batch-size") or () if word.isdecimal()]:
        draft.set("train.rampup_batch_size", ramp, "rampup-batch-size")
    if samples := line.get("train-samples"):
        steps = _steps(samples, full, ramp)
        if steps < 1:
            rule = f"is less than one batch of {full}"
            draft.refuse(f"--train-samples {samples} {rule}; use {full} or more")
        draft.set("train.steps", max(steps, 1), "train-samples")
        if ramp:
            draft.deviations.append("the learning rate follows steps, not samples, while the batch grows")
    else:
        steps = steps or DEFAULT_STEPS
        draft.set("train.steps", steps, "train-iters", default=CHOSEN)
    _remat(draft)
    for name in ("attention-dropout", "hidden-dropout"):
        if name not in line.given:
            draft.deviations.append(f"no --{name}: 0.1 by default in Megatron-LM; parallax has no dropout")
    if line.get("fp16"):
        draft.set("train.precision", "bfloat16", "fp16")
        draft.deviations.append("--fp16: parallax has no float16; weights and activations are bfloat16")
    else:
        draft.set("train.precision", "bfloat16" if line.get("bf16") else "float32", "bf16")
    draft.set("train.seed", line.get("seed"), "seed")
    if line.get("eval-iters") < 1:
        draft.set("train.eval_every", 0, "eval-iters")
        draft.ignore("eval-interval", "--eval-iters 0 turns evaluation off")
        draft.deviations.append("--eval-iters 0: parallax evaluates once, at the end")
    else:
        draft.set("train.eval_every", line.get("eval-interval"), "eval-interval")
        draft.set("train.eval_batches", line.get("eval-iters"), "eval-iters")
    _optimizer(draft, steps, full)


def _steps(samples: int, full: int, ramp: Sequence[int]) -> int:
    """Whole batches in `samples`, of a batch size that may grow."""
    train = Train(steps=1, seq_len=1, global_batch_size=full, rampup_batch_size=tuple(ramp))
    if len(ramp) == 3 and min(ramp) > 0 and ramp[0] < full and (full - ramp[0]) % ramp[1] == 0:
        steps = range(samples // ramp[0] + 1)
        return bisect_right(steps, samples, key=lambda n: samples_after(train, 0, n)) - 1
    return samples // full


def _remat(draft: Draft) -> None:
    line = draft.line
    flags = ("recompute-granularity", "recompute-activations", "recompute-method", "recompute-num-layers")
    remat = "selective" if line.get("recompute-activations") else line.get("recompute-granularity") or "none"
    layers = line.get("recompute-num-layers")
    if remat != "full":
        for name in flags[2:]:
            draft.ignore(name, "of --recompute-granularity full")
    if remat == "selective":
        modules = line.get("recompute-modules")
        draft.set("train.remat", remat, *flags[:2], "recompute-modules")
        if modules != ["core_attn"]:
            what = f"--recompute-modules {' '.join(modules)}"
            draft.deviations.append(f"{what}: parallax has one choice of what selective recomputes (docs/pipeline.md)")
        return
    draft.ignore("recompute-modules", "of --recompute-granularity selective")
    draft.set("train.remat", remat, *(flags if remat == "full" else flags[:2]))
    if remat == "full" and (line.get("recompute-method") == "block" or layers not in (None, 1)):
        what = f"--recompute-method {line.get('recompute-method')} --recompute-num-layers {layers}"
        draft.deviations.append(f"{what}: parallax keeps the input of every layer and recomputes every layer")


def _optimizer(draft: Draft, steps: int, batch: int) -> None:
    line = draft.line
    lr = line.get("lr")
    draft.set("optimizer.learning_rate", _usual("optimizer.learning_rate") if lr is None else lr, "lr", default=CHOSEN)
    if lr is None:
        draft.defaults["--lr"] = f"optimizer.learning_rate = {_usual('optimizer.learning_rate')}; {CHOSEN}"
    peak = draft.keys["optimizer.learning_rate"][0]
    ratio = line.get("min-lr") / peak if peak else 0.0
    draft.set("optimizer.min_learning_rate_ratio", float(f"{ratio:.12g}"), "min-lr")
    style = line.get("lr-decay-style")
    if style in ("constant", "linear", "cosine"):
        draft.set("optimizer.schedule", style, "lr-decay-style")
    else:
        rule = "parallax has no such decay; use constant, linear or cosine"
        draft.refuse(f"--lr-decay-style {style}: {rule}")
    decay = line.get("lr-decay-iters")
    if line.get("lr-decay-samples"):
        decay = line.get("lr-decay-samples") // batch
    for name in ("lr-decay-iters", "lr-decay-samples"):
        if style == "constant" or decay == steps:
            draft.ignore(name, "the learning rate decays to the last step, as here")
        else:
            deviates = f"--{name} {line.get(name)}: the learning rate decays to the last step, {steps}, not to {decay}"
            draft.ignore(name, "parallax decays to the last step", deviates)
    flags = ("lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction")
    warmup = line.get("lr-warmup-iters") or line.get("lr-warmup-samples") // batch
    if fraction := line.get("lr-warmup-fraction"):
        warmup = round(fraction * (decay or steps))
    draft.set("optimizer.warmup_steps", warmup, *flags)
    for key, name in (
        ("weight_decay", "weight-decay"),
        ("beta1", "adam-beta1"),
        ("beta2", "adam-beta2"),
        ("epsilon", "adam-eps"),
        ("clip_norm", "clip-grad"),
    ):
        draft.set(f"optimizer.{key}", line.get(name), name)


def map_data(draft: Draft, folder: str) -> None:
    """Sources are relative to the run file's `folder`; those of the command line to the working folder."""
    line = draft.line
    words = line.get("data-path") or []
    place = lambda path: path if os.path.isabs(path) or path[:1] == "~" else os.path.relpath(path, folder or os.curdir)
    weights = [_number(word) for word in words[::2]]
    if line.get("mock-data") and words:
        draft.refuse("--mock-data and --data-path exclude each other; use one of them")
    elif not words:
        draft.set("data.source", "synthetic", "data-path", "mock-data", default=CHOSEN)
    elif len(words) == 1:
        draft.set("data.source", place(words[0]), "data-path")
    elif len(words) % 2 == 0 and None not in weights:
        table: dict[str, float] = {}
        for weight, path in zip(weights, words[1::2], strict=True):
            table[place(path)] = table.get(place(path), 0.0) + (weight or 0.0)
        draft.set("data.source", table, "data-path")
    else:
        rule = "parallax does not weigh sources by their lengths; use weight path weight path ..."
        draft.refuse(f"--data-path {' '.join(words)}: {rule}")
    _held_out(draft, bool(words))
    model = line.get("tokenizer-model") or ""
    if words and os.path.basename(model) == "tokenizer.json":
        draft.set("data.tokenizer", place(model), "tokenizer-model")
    else:
        draft.ignore("tokenizer-model", "an indexed dataset holds tokens, not text" if words else "there is no text")
    if line.get("reset-attention-mask"):
        draft.set("data.isolate_documents", True, "reset-attention-mask")


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _held_out(draft: Draft, has_data: bool) -> None:
    """Validation and test parts together are held out, so that the training part is the same."""
    line = draft.line
    if not has_data:
        draft.ignore("split", "there are no documents to split")
        return
    parts = [_number(part) or 0.0 for part in line.get("split").replace("/", ",").split(",")]
    total = math.fsum(parts)
    if total <= 0 or min(parts) < 0 or not math.isfinite(total) or parts[0] == 0:
        rule = "is no list of shares with training data in it"
        draft.refuse(f"--split {line.get('split')} {rule}; use for example 969,30,1")
        return
    share = float(f"{1 - parts[0] / total:.12g}")
    if share == 0:
        share = 0.001
        draft.deviations.append("--split leaves nothing for evaluation; parallax holds out 0.001 of the documents")
    draft.set("data.valid_fraction", share, "split")


def map_files(draft: Draft) -> None:
    line = draft.line
    every, kept = line.get("save-interval"), line.get("save-retain-interval")
    if every:
        draft.set("checkpoint.every", every, "save-interval")
        every_one = f"{OF_MEGATRON}: every checkpoint is kept"
        draft.set("checkpoint.keep_every", kept or every, "save-retain-interval", default=every_one)
    else:
        draft.ignore("save-retain-interval", "nothing is saved at intervals")
    draft.set("log.dir", line.get("save") or "runs/translated", "save", default=CHOSEN)
    if line.get("load") == line.get("save"):
        draft.ignore("load", "`parallax train --resume` goes on from log.dir")
    else:
        what = "weights of Megatron-LM are not read; the run begins with new ones"
        draft.ignore("load", what, f"--load {line.get('load')}: {what}")
    draft.set("log.every", line.get("log-interval"), "log-interval")
