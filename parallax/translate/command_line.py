"""A command line taken apart: torchrun's options, the script that trains, and the flags of Megatron-LM with typed
values. No jax."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parallax.config import brief, either
from parallax.translate.flags import FLAGS, TORCHRUN_OPTIONS, Flag
from parallax.translate.shell import LAUNCHERS

_OTHER_MODELS = ("bert", "t5", "ict", "retro", "vision", "vlm", "mamba", "biencoder")


@dataclass(frozen=True)
class CommandLine:
    """`given` has the flags that stood there, without dashes; the other tables have the words as keys, and a reason."""

    nodes: int = 1
    devices_per_node: int = 1
    launched: tuple[str, ...] = ()  # torchrun's own options that say so, as they were spelled
    given: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    deviations: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """The value that stood there, or Megatron-LM's default."""
        return self.given[name] if name in self.given else FLAGS[name].default

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def model_parallel(self) -> int:
        """Devices that hold one copy of the model: TP x PP x CP."""
        return math.prod(self.get(f"{axis}-parallel-size") for axis in ("tensor-model", "pipeline-model", "context"))

    @property
    def data_parallel(self) -> int:
        """At least 1, also where the devices do not hold one copy of the model."""
        return max(self.devices // self.model_parallel, 1)


def parse(words: Sequence[str]) -> CommandLine:
    """Every word ends in a table; what is wrong in `refused`."""
    ignored: dict[str, str] = {}
    refused: dict[str, str] = {}
    launch, rest = _launch(words, ignored, refused)
    flags = _values(rest, FLAGS, "Megatron-LM", ignored, refused)
    sizes, spelled = {"nnodes": 1, "nproc-per-node": 1}, []
    for name, (word, text) in launch.items():
        if name not in sizes:
            ignored[word] = TORCHRUN_OPTIONS[name].reason
        elif text.isdecimal() and int(text):
            sizes[name] = int(text)
            spelled.append(word)
        else:
            use = "use the number of its GPUs, such as 8" if name == "nproc-per-node" else "use their number, such as 8"
            refused[word] = f"{word} {brief(text)} is no number that a layout can be made for; {use}"
    given, deviations = {}, {}
    for name, (word, value) in flags.items():
        flag = FLAGS[name]
        if flag.outcome == "mapped":
            given[name] = value
            continue
        outcome = "ignored" if _is_neutral(flag, value) else flag.outcome
        if outcome == "refused":
            refused[word] = f"{_spelled(word, value)}: {flag.reason}"
            continue
        ignored[word] = f"{flag.neutral} changes nothing here" if outcome != flag.outcome else flag.reason
        if outcome == "deviates":
            deviations[word] = f"{_spelled(word, value)}: {flag.reason}"
        given[name] = value
    return CommandLine(sizes["nnodes"], sizes["nproc-per-node"], tuple(spelled), given, ignored, deviations, refused)


def _launch(
    words: Sequence[str], ignored: dict[str, str], refused: dict[str, str]
) -> tuple[dict[str, tuple[str, Any]], Sequence[str]]:
    """torchrun's options, and the words after the script."""
    starts = [i for i, word in enumerate(words) if os.path.basename(word) in LAUNCHERS]
    if words and words[0].startswith("-") and not starts:
        return {}, words
    if not starts:
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        _script(words[at], ignored, refused)
        return {}, words[at + 1 :]
    before = [word for word in words[: starts[0]] if word not in ("-m", "exec", "nohup", "time", "env", "-u")]
    before = [word for word in before if not re.match(r"\w+=", word) and not re.fullmatch(r"(.*/)?python[\d.]*", word)]
    if before:
        ignored[" ".join(before)] = "what starts torchrun; nodes and devices are torchrun's"
    at = starts[0] + 1
    options: list[str] = []
    while at < len(words) and words[at].startswith("-"):
        name, equals, _ = words[at].lstrip("-").replace("_", "-").partition("=")
        takes = 1 if not equals and TORCHRUN_OPTIONS.get(name, Flag("", "a word", "ignored")).takes != "nothing" else 0
        head, equals, text = words[at].partition("=")
        options += [f"--{head.lstrip('-')}{equals}{text}", *words[at + 1 : at + 1 + takes]]
        at += 1 + takes
    launch = _values(options, TORCHRUN_OPTIONS, "torchrun", ignored, refused)
    if at >= len(words):
        refused["torchrun"] = "torchrun is given no script; use for example pretrain_gpt.py"
        return launch, []
    _script(words[at], ignored, refused)
    return launch, words[at + 1 :]


def _script(path: str, ignored: dict[str, str], refused: dict[str, str]) -> None:
    name = os.path.basename(path)
    if other := [model for model in _OTHER_MODELS if model in name]:
        refused[path] = f"{path} trains another kind of model ({other[0]}); use pretrain_gpt.py"
    elif name != "pretrain_gpt.py":
        ignored[path] = "taken for pretrain_gpt.py"


def _values(
    words: Sequence[str], known: dict[str, Flag], of: str, ignored: dict[str, str], refused: dict[str, str]
) -> dict[str, tuple[str, Any]]:
    """By name: the flag as it was spelled, and its value. The last of repeated flags counts, as argparse has it."""
    found: dict[str, tuple[str, Any]] = {}
    at = 0
    while at < len(words):
        word, equals, text = words[at].partition("=")
        end = next((i for i in range(at + 1, len(words)) if _is_flag(words[i])), len(words))
        values = [text] if equals else list(words[at + 1 : end])
        name = word[2:].replace("_", "-") if known is TORCHRUN_OPTIONS else word[2:]
        flag = known.get(name) if word.startswith("--") else None
        at = at + 1 if equals else end
        if flag is None:
            refused[word] = f"{_bare(word)} is not a known flag of {of}; {_closest(word, known)}"
            continue
        few = {"nothing": 0, "words": len(values)}.get(flag.takes, 1)
        if equals and flag.takes == "nothing":
            refused[word] = f"{word} takes no value; leave {brief(f'={text}')} out"
            continue
        for extra in values[few:]:
            refused[extra] = f"{_bare(extra)} after {word} belongs to no flag; leave it out, or put quotes around it"
        try:
            value = _typed(flag, values[:few])
        except ValueError as error:
            refused[word] = f"{' '.join([word, *values[:few]])}: {error}"
            continue
        if name in found and flag.takes != "nothing":
            before = found[name]
            ignored[_spelled(*before)] = f"{word} comes again later, and the last one counts"
        found[name] = word, value
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("--") or re.match(r"-[A-Za-z]", word) is not None


def _typed(flag: Flag, values: list[str]) -> Any:
    """Raises ValueError with the rule and what would work."""
    if flag.takes == "nothing":
        return True
    if flag.takes == "words":
        return values
    usual = (
        f"{flag.default}" if flag.default is not None else {"an integer": "8", "a number": "0.1"}.get(flag.takes, "x")
    )
    if not values:
        raise ValueError(f"it takes {either(flag.choices) if flag.choices else flag.takes}; use for example {usual}")
    if flag.choices and values[0] not in flag.choices:
        raise ValueError(f"it takes {either(flag.choices)}")
    if flag.takes == "a word":
        return values[0]
    try:
        number = int(values[0]) if flag.takes == "an integer" else float(values[0])
    except ValueError:
        raise ValueError(f"it takes {flag.takes}; use for example {usual}") from None
    if not math.isfinite(number) or abs(number) > 1e18:
        raise ValueError(f"it takes {flag.takes} of usual size; use for example {usual}")
    return number


def _bare(word: str) -> str:
    """As a message begins with it: shortened where it is long."""
    return brief(word)[1:-1]


def _spelled(word: str, value: Any) -> str:
    """The flag with its value, as it stood there."""
    return " ".join([word, *([] if value is True else value if isinstance(value, list) else [str(value)])])


def _is_neutral(flag: Flag, value: Any) -> bool:
    if flag.neutral is None or not isinstance(value, str):
        return False
    try:
        return float(value) == float(flag.neutral)
    except ValueError:
        return value == flag.neutral


def _closest(word: str, known: dict[str, Flag]) -> str:
    close = difflib.get_close_matches(word.lstrip("-").replace("_", "-"), known, n=3)
    return f"use {either(f'--{name}' for name in close)}" if close else "leave it out"
