"""A run file: TOML into frozen dataclasses, every key checked, every problem listed at once. No jax.

The dataclasses below are the whole language: a field's type, default, bounds and one-line doc are read by the checks
(`build`), by the writer (`to_toml`) and by docs/config.md (`markdown_tables`).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import operator
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
BOUNDS = {
    "at_least": ("at least", operator.ge),
    "above": ("greater than", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("less than", operator.lt),
    "fits": ("at most", operator.le),  # what the number type of the program holds: said only where it is broken
}
SCHEDULES = ("1f1b", "interleaved", "gpipe")  # built in
SOURCES = ("python-stdlib", "synthetic")  # on every machine
INT_MAX, SEED_MAX, FLOAT_MAX = 2**31 - 1, 2**32 - 1, 1e30
SIZE: dict[str, float] = {"at_least": 1, "fits": INT_MAX}
COUNT: dict[str, float] = {"at_least": 0, "fits": INT_MAX}


class ConfigError(ValueError):
    """The input is wrong. `problems` has one line each: the value, the rule, the nearest values that work."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


def key(default: Any, doc: str, **bounds: float) -> Any:
    """A field with its one-line doc. `MISSING` as default: required. `bounds`: the rules of BOUNDS."""
    return field(default=default, metadata={"doc": doc, "bounds": bounds})


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str = key(MISSING, "a preset of a model file: llama-tiny, llama3-8b, gpt3-175b, ...")
    file: str = key("", "your own model file, relative to the run file; empty: the files in models/")
    overrides: dict[str, Any] = field(default_factory=dict)  # the other keys of [model]: fields of the model's Config


@dataclass(frozen=True, kw_only=True)
class Parallel:
    dp: int = key(1, "data parallel: copies of the model, each with its share of the batch", **SIZE)
    pp: int = key(1, "pipeline parallel: ranks that the layers are spread over", **SIZE)
    ep: int = key(1, "expert parallel; not built yet", **SIZE)
    cp: int = key(1, "context parallel: ranks that share each sequence", **SIZE)
    tp: int = key(1, "tensor parallel: devices that share each layer", **SIZE)
    virtual_stages: int = key(1, "chunks of layers on each pipeline rank (v)", **SIZE)
    schedule: str = key("1f1b", "order of the pipeline's work: 1f1b, interleaved, gpipe, or a CSV file of your own")
    sequence_parallel: bool = key(True, "split activations between layers over tp, along the sequence")
    zero: Literal[0, 1] = key(1, "1: optimizer states sharded over dp, ep and cp; 0: replicated")
    context: Literal["ring", "all_gather"] = key("ring", "how attention sees the other cp ranks' keys and values")
    skip_idle: bool = key(False, "branch around idle pipeline phases instead of masking them")


@dataclass(frozen=True, kw_only=True)
class MeshChoice:
    name: str = key("cpu", "a machine in meshes/; cpu emulates the devices")
    file: str = key("", "your own machine file, relative to the run file; used instead of name")


@dataclass(frozen=True, kw_only=True)
class Train:
    steps: int = key(MISSING, "optimizer steps", **SIZE)
    seq_len: int = key(MISSING, "tokens in a sequence", **SIZE)
    global_batch_size: int = key(MISSING, "sequences in a step, over all devices", **SIZE)
    micro_batch_size: int = key(1, "sequences in a microbatch, on each dp and ep rank", **SIZE)
    rampup_batch_size: tuple[int, ...] = key(
        (), "[start, increment, samples]: global batch size from start to its full value over that many samples"
    )
    remat: Literal["none", "selective", "full"] = key("full", "what the backward pass recomputes (docs/pipeline.md)")
    precision: Literal["bfloat16", "float32"] = key("bfloat16", "of weights and activations; accumulation is float32")
    seed: int = key(0, "of initialisation and data order", at_least=0, fits=SEED_MAX)
    eval_every: int = key(0, "steps between evaluations; 0: only at the end", **COUNT)
    eval_batches: int = key(8, "global batches in an evaluation", **SIZE)
    max_skipped: int = key(100, "stop the run after this many steps with gradients that are not finite", **COUNT)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    learning_rate: float = key(3e-4, "peak, reached after warm-up", above=0, fits=FLOAT_MAX)
    min_learning_rate_ratio: float = key(0.1, "last learning rate over the peak", at_least=0, at_most=1)
    warmup_steps: int = key(0, "steps of linear warm-up", **COUNT)
    schedule: Literal["cosine", "linear", "constant"] = key("cosine", "shape of the decay after warm-up")
    weight_decay: float = key(0.1, "AdamW's, off norms and biases", at_least=0, fits=FLOAT_MAX)
    beta1: float = key(0.9, "decay of Adam's first moment", at_least=0, below=1, fits=0.999999)
    beta2: float = key(0.95, "decay of Adam's second moment", at_least=0, below=1, fits=0.999999)
    epsilon: float = key(1e-8, "added to the root of Adam's second moment", at_least=1e-30, fits=FLOAT_MAX)
    clip_norm: float = key(1.0, "global gradient norm is clipped to this; 0: no clipping", at_least=0, fits=FLOAT_MAX)


@dataclass(frozen=True, kw_only=True)
class Data:
    source: str | dict[str, float] = key(  # noqa: RUF009
        "python-stdlib",
        "python-stdlib, synthetic, a path (docs/training.md), or a mixture: a table of sources and their weights",
    )
    tokenizer: str = key("bytes", "how text becomes tokens: bytes, or the path of a tokenizer.json")
    text_key: str = key("text", "the key of a .jsonl line that holds its text")
    separator: str = key("", "token that ends each document; empty: the tokenizer's end-of-text token, or byte 0")
    valid_fraction: float = key(0.05, "share of the documents held out for evaluation", above=0, below=1)
    isolate_documents: bool = key(False, "keep attention inside documents; false: it crosses them")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: int = key(0, "steps between checkpoints; 0: only at the end and on Ctrl-C", **COUNT)
    keep: int = key(2, "newest checkpoints kept", **SIZE)
    keep_every: int = key(0, "checkpoints of steps that this divides are kept for good; 0: none", **COUNT)


@dataclass(frozen=True, kw_only=True)
class Log:
    dir: str = key(MISSING, "folder of the run: run.toml as resolved, metrics.jsonl, checkpoints/, tensorboard/")
    every: int = key(1, "steps between lines of metrics", **SIZE)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    model: Model
    parallel: Parallel = Parallel()
    mesh: MeshChoice = MeshChoice()
    train: Train
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    log: Log

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each (dp, ep) rank: m."""
        return self.train.global_batch_size // (self.parallel.dp * self.parallel.ep * self.train.micro_batch_size)

    @property
    def devices(self) -> int:
        parallel = self.parallel
        return parallel.pp * parallel.dp * parallel.ep * parallel.cp * parallel.tp


SECTIONS: dict[str, type] = get_type_hints(RunConfig)
PATHS = {  # keys that name a file to read, and the words that may stand in its place
    "model.file": (),
    "mesh.file": (),
    "parallel.schedule": SCHEDULES,
    "data.source": SOURCES,
    "data.tokenizer": ("bytes",),
}


def keys_of(section: type) -> list[dataclasses.Field[Any]]:
    """The fields that are keys of a run file (all but Model.overrides)."""
    return [f for f in dataclasses.fields(section) if "doc" in f.metadata]


# Values and messages


def show(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        items = (f"{k if re.fullmatch('[A-Za-z0-9_-]+', k) else show(k)} = {show(v)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, int) and value.bit_length() > 10_000:
        return hex(value)  # Python writes no decimals of such a length
    return str(value)


def brief(value: Any) -> str:
    """A value in a message: as TOML writes it, its middle left out where it is long."""
    text = show(value)
    return text if len(text) <= 200 else f"{text[:60]}...{text[-20:]}"


def either(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The known name closest to `name`, or all of them where none is close."""
    known = list(known)
    return either(prefix + word for word in difflib.get_close_matches(name, known, n=1) or known)


def matches(value: Any, hint: Any) -> bool:
    """Whether a TOML value has the type of an annotation. An int is a float; a bool is neither."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if origin in (Union, UnionType):
        return any(matches(value, arg) for arg in args)
    if origin is dict:
        return isinstance(value, dict) and all(matches(v, args[1]) for v in value.values())
    if origin in (tuple, list):
        return isinstance(value, list | tuple) and all(matches(v, args[0]) for v in value)
    return type(value) is hint


def kind(hint: Any, bounds: Mapping[str, float] = MappingProxyType({})) -> str:
    """An annotation, and bounds, in words."""
    if get_origin(hint) is Literal:
        return either(map(show, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return either(kind(arg) for arg in get_args(hint) if arg is not type(None))
    if dataclasses.is_dataclass(hint):
        return "a table"
    words = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
    if get_origin(hint) in (tuple, list, dict):
        name, of = ("table", get_args(hint)[-1]) if get_origin(hint) is dict else ("list", get_args(hint)[0])
        return f"a {name} of {({int: 'integers', float: 'finite numbers', str: 'strings'}).get(of, 'values')}"
    return f"{words.get(hint, hint)} {_limits(bounds)}".rstrip()


def _limits(bounds: Mapping[str, float]) -> str:
    return " and ".join(f"{BOUNDS[rule][0]} {bound}" for rule, bound in bounds.items() if rule != "fits")


def value_problem(name: str, value: Any, hint: Any, default: Any, bounds: Mapping[str, float]) -> str | None:
    """What is wrong with one key's value: its type, its choice or its bounds."""
    if not matches(value, hint):
        if get_origin(hint) is Literal:
            return f"{name} = {brief(value)} is not a choice of this release; use {kind(hint)}"
        near = _as_type(value, hint, default)
        example = _within(near, bounds) if matches(near, hint) else default
        if any(not BOUNDS[rule][1](example, bound) for rule, bound in bounds.items() if example is not MISSING):
            example = default
        use = "" if example is MISSING or example is None else f"; use {show(example)}"
        return f"{name} = {brief(value)} must be {kind(hint, bounds if example != near else {})}{use}"
    broken = [rule for rule, bound in bounds.items() if not BOUNDS[rule][1](value, bound)]
    if not broken:
        return None
    bound = bounds[broken[0]]
    nearest = {"at_least": f"{bound} or more", "at_most": f"{bound} or less", "fits": f"{bound} or less"}
    use = nearest.get(broken[0], "" if default is MISSING else f"for example {show(default)}")
    rule = f"at most {bound}" if broken == ["fits"] else _limits(bounds)
    return f"{name} = {brief(value)} must be {rule}" + (f"; use {use}" if use else "")


def _within(value: Any, bounds: Mapping[str, float]) -> Any:
    """The number nearest to `value` that keeps to the bounds that can be met exactly."""
    value = max(value, bounds["at_least"]) if "at_least" in bounds else value
    return min([value, *(bounds[rule] for rule in ("at_most", "fits") if rule in bounds)])


def _as_type(value: Any, hint: Any, default: Any) -> Any:
    """The value nearest to `value` that has the type, or the default."""
    if hint is str and isinstance(value, int | float):
        return show(value)
    if hint is bool:
        return str(value).lower() in ("true", "yes", "on", "1")
    try:
        return {int: lambda: round(float(value)), float: lambda: float(value)}[hint]()
    except (KeyError, TypeError, ValueError, OverflowError):
        return default


# Reading


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError where there is no such file, or no TOML in it."""
    if "\0" in str(path):
        raise ConfigError([f"{show(str(path))} holds a NUL character; give the path of a TOML file"])
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}; give the path of a TOML file"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: not TOML: nested too deeply"]) from None
    except ValueError as error:  # TOMLDecodeError names line and column; UnicodeDecodeError the byte
        raise ConfigError([f"{path}: not TOML: {error}"]) from None


def build(cls: type[T], table: dict[str, Any], prefix: str = "") -> tuple[T, dict[str, str]]:
    """`table` as a `cls`, and the problems by key. A wrong or missing value is replaced by the default or by an empty
    value of its type, so that later checks can go on."""
    hints, fields = get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems, values = {}, {}
    for name in sorted(table.keys() - fields.keys()):
        use = either(_homes(name)) if _homes(name) else suggest(name, fields, prefix)
        problems[prefix + name] = f"{prefix}{name} = {brief(table[name])} is not a known key; use {use}"
    for name, f in fields.items():
        hint, bounds = hints[name], f.metadata.get("bounds", {})
        if name in table:
            problem = value_problem(prefix + name, table[name], hint, f.default, bounds)
            if problem is None:
                convert = {float: float, tuple: tuple}.get(get_origin(hint) or hint, lambda value: value)
                values[name] = convert(table[name])
                continue
        elif f.default is not MISSING or f.default_factory is not MISSING:
            continue
        else:
            problem = f"{prefix}{name} is missing and has no default; set it to {kind(hint, bounds)}"
        problems[prefix + name] = problem
        if f.default is MISSING:
            values[name] = get_args(hint)[0] if get_origin(hint) is Literal else (get_origin(hint) or hint)()
    return cls(**values), problems


def read(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, dict[str, str]]:
    """The run file with its overrides (`train.steps=20`), and the problems by key (see `build`)."""
    path, problems = Path(path), {}
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in read_toml(path).items():
        if isinstance(value, dict) and name in SECTIONS:
            tables[name] = {k: _full_path(f"{name}.{k}", v, path.parent) for k, v in value.items()}
        elif name in SECTIONS:
            problems[name] = f"{name} = {brief(value)} is not a section; write [{name}] and its keys below it"
        elif _homes(name):
            problems[name] = f"{name} = {brief(value)} stands outside of its section; use {either(_homes(name))}"
        else:
            problems[name] = f"[{name}] is not a known section; use {suggest(name, SECTIONS)}"
    for override in overrides:
        dotted, equals, text = (part.strip() for part in override.partition("="))
        section, _, name = dotted.partition(".")
        if not equals or not name or section not in SECTIONS:
            use = _meant(section, name, text)
            problems[override] = f"override {brief(override)} is not section.key=value; use {use}"
        elif not text:
            problems[dotted] = f"{dotted} has no value; write {_example(section, name)}"
        elif isinstance(value := parse(text), str) and text[0] in "[{":
            quote = ', with keys in quotes: {"my/texts" = 0.7, "a.jsonl" = 0.3}' if text[0] == "{" else ": [4, 4, 120]"
            problems[dotted] = f"{dotted} = {brief(text)} is not TOML; write it as in a file{quote}"
        else:
            tables[section][name] = _full_path(dotted, value, Path())
    tables["model"] = _split_overrides(tables["model"])
    sections = {}
    for section, cls in SECTIONS.items():
        sections[section], wrong = build(cls, tables[section], f"{section}.")
        problems |= {} if section in problems else {name: line for name, line in wrong.items() if name not in problems}
    return RunConfig(**sections), problems


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run file with its overrides. Raises ConfigError with every problem of a single key."""
    config, problems = read(path, overrides)
    if problems:
        raise ConfigError(list(problems.values()))
    return config


def _homes(name: str) -> list[str]:
    """The sections' keys of that name, dotted."""
    return [f"{section}.{name}" for section, cls in SECTIONS.items() if any(f.name == name for f in keys_of(cls))]


def _full_path(dotted: str, value: Any, base: Path) -> Any:
    """Expands `~`; makes the path of a file that is read absolute: it is relative to the run file or, on the command
    line, to the working directory. Raises ConfigError where two sources of a mixture are the same path."""
    if dotted == "data.source" and isinstance(value, dict):
        named: dict[str, str] = {}
        for source in value:
            path = _full_path(dotted, source, base)
            if (other := named.setdefault(path, source)) != source:
                message = f"{dotted}: {show(other)} and {show(source)} are both {show(path)}"
                raise ConfigError([f"{message}; name it once, with the sum of their weights"])
        return {path: value[source] for path, source in named.items()}
    if not isinstance(value, str) or not value or dotted not in {"log.dir", *PATHS} or value in PATHS.get(dotted, ()):
        return value
    if dotted == "parallel.schedule" and not value.endswith(".csv"):
        return value
    try:
        path = Path(value).expanduser()
        return str((base / path).resolve()) if dotted in PATHS else str(path) if value.startswith("~") else value
    except (OSError, RuntimeError, ValueError):  # no such user, a loop of links, a NUL: said where it is opened
        return value


def parse(text: str) -> Any:
    """A TOML value, or the text itself where it is not one value."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if table.keys() == {"value"} else text


def _meant(section: str, name: str, text: str) -> str:
    """What an override that is not section.key=value may have meant."""
    value = f"={text}" if text else ""
    if section in SECTIONS:
        return _example(section, name)
    if homes := _homes(section) or _homes(name):
        return either(home + (value or "=...") for home in homes)
    close = difflib.get_close_matches(section, SECTIONS, n=1)
    return f"{close[0]}.{name}{value or '=...'}" if close and name else "for example train.steps=20"


def _example(section: str, name: str) -> str:
    """`train.steps=20`: a key with its default or, where it has none, with a value of its type."""
    for f in keys_of(SECTIONS[section]):
        if f.name == name:
            usual = {"model.name": "llama-tiny", "log.dir": "runs/x"}.get(f"{section}.{name}", "20")
            return f"{section}.{name}={usual if f.default is MISSING else show(f.default)}"
    return f"{section}.{name}=..." if name else "for example train.steps=20"


def _split_overrides(table: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in keys_of(Model)}
    own = {name: value for name, value in table.items() if name in names}
    return own | {"overrides": {name: value for name, value in table.items() if name not in names}}


# Writing


def to_toml(config: RunConfig) -> str:
    """The run file as resolved, every key written out; `load` reads it back equal."""
    lines = []
    for section in SECTIONS:
        table = dataclasses.asdict(getattr(config, section))
        table |= table.pop("overrides", {})
        lines += [f"[{section}]", *(f"{name} = {show(value)}" for name, value in table.items()), ""]
    return "\n".join(lines)


def markdown_tables() -> str:
    """The tables of docs/config.md, one a section."""
    parts = []
    for section, cls in SECTIONS.items():
        hints, rows = get_type_hints(cls), []
        for f in keys_of(cls):
            default = "required" if f.default is MISSING else f"`{show(f.default)}`"
            rows.append(
                f"| `{f.name}` | {kind(hints[f.name], f.metadata['bounds'])} | {default} | {f.metadata['doc']} |"
            )
        if cls is Model:
            rows.append(
                "| any other | as in the model's `Config` | the preset's | a field of `Config`: `layers = 16` |"
            )
        parts.append("\n".join([f"## [{section}]", "", "| key | value | default | |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)
