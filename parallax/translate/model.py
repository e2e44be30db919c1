"""The model of a command line: which file of models/ computes it, and the preset or the sizes that make it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from parallax.config import Model
from parallax.model_files import load_model
from parallax.translate.mapping import CHOSEN, OF_MEGATRON, Draft

# What a flag must say for models/llama.py, and otherwise for models/gpt.py.
LLAMA = {
    "rotary positions": "--position-embedding-type rope",
    "RMSNorm": "--normalization RMSNorm",
    "SwiGLU": "--swiglu",
    "no biases": "--disable-bias-linear",
}
VOCABULARIES = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}
GPT2 = VOCABULARIES["GPT2BPETokenizer"]
SIZE_FLAGS = ("num-layers", "hidden-size", "num-attention-heads")


class Vocabulary(NamedTuple):
    """`size` is padded, and None where nothing says it; `presets` are the sizes of a preset that it may be."""

    size: int | None
    presets: tuple[int, ...]
    flags: tuple[str, ...]
    default: str


Sizes = dict[str, tuple[Any, tuple[str, ...], str]]  # by field of Config: its value, its flags, whose default it is


def map_model(draft: Draft) -> None:
    """Refuses what neither file computes. Imports a model file, and jax with it."""
    family = _family(draft)
    if family is None:
        return
    sizes = _llama(draft) if family == "llama" else _gpt(draft)
    if draft.refused:
        return
    presets = load_model(Model(name="llama3-8b" if family == "llama" else "gpt3-175b"))[0].PRESETS
    vocabulary = _vocabulary(draft)
    if preset := _equal_preset(presets, sizes, vocabulary):
        _use_preset(draft, preset, sizes, vocabulary)
        return
    if vocabulary.size is None:
        draft.use("model.vocab_size", "make-vocab-size-divisible-by")
    size = vocabulary.size or _padded(draft, GPT2)
    sizes = {"vocab_size": (size, vocabulary.flags, vocabulary.default), **sizes}
    try:
        name = _nearest_preset(presets, {name: value for name, (value, _, _) in sizes.items()})
    except ValueError as error:
        draft.refuse(f"model.{error}")
        return
    draft.keys["model.name"] = name, "the preset nearest in size; its own sizes are replaced"
    for field, (value, flags, default) in sizes.items():
        draft.set(f"model.{field}", value, *flags, default=default)


def _family(draft: Draft) -> str | None:
    """`llama` or `gpt`. One default that does not go with the other flags is a deviation; more, or a flag that
    contradicts them, is refused."""
    line = draft.line
    rotary = line.get("use-rotary-position-embeddings") or line.get("position-embedding-type") == "rope"
    has = dict(
        zip(
            LLAMA,
            (rotary, line.get("normalization") == "RMSNorm", line.get("swiglu"), line.get("disable-bias-linear")),
            strict=True,
        )
    )
    positions = line.get("position-embedding-type")
    if positions not in ("rope", "learned_absolute") and not rotary:
        rule = "models/ has rotary and learned positions; use rope or learned_absolute"
        draft.refuse(f"--position-embedding-type {positions}: {rule}")
        return None
    lacks = [feature for feature, yes in has.items() if not yes]
    if len(lacks) == len(has):
        _mark_family(draft, "models/gpt.py")
        return "gpt"
    against = [name for name in ("position-embedding-type", "normalization") if name in line.given]
    against = [f"--{name} {line.get(name)}" for name in against if line.get(name) in ("learned_absolute", "LayerNorm")]
    if rotary:
        against = [word for word in against if not word.startswith("--position")]
    if len(lacks) > 1 or against:
        given = " ".join(flag for feature, flag in LLAMA.items() if has[feature])
        rule = f"with {' '.join(against) or 'the defaults'} is in no file of models/"
        add = f"add {' '.join(LLAMA[feature] for feature in lacks)} for models/llama.py"
        draft.refuse(f"{given} {rule}; {add}, or leave {given} out for models/gpt.py")
        return None
    for feature in lacks:
        what = "Megatron-LM's default differs"
        draft.deviations.append(f"no {LLAMA[feature]}: {what}; models/llama.py has {feature}")
    if "add-qkv-bias" in line.given and has["no biases"]:
        draft.refuse("--add-qkv-bias: models/llama.py has no biases; leave it out")
    _mark_family(draft, "models/llama.py")
    return "llama"


def _mark_family(draft: Draft, file: str) -> None:
    flags = ("position-embedding-type", "use-rotary-position-embeddings", "normalization", "swiglu")
    draft.use("model.name", *flags, "disable-bias-linear")
    draft.ignore("add-qkv-bias", "every product has a bias")
    for name, value in (
        ("position-embedding-type", "learned positions"),
        ("normalization", "LayerNorm"),
        ("swiglu", "GELU"),
        ("disable-bias-linear", "biases"),
    ):
        rotary = name == "position-embedding-type" and "use-rotary-position-embeddings" in draft.line.given
        if name not in draft.line.given and file == "models/gpt.py" and not rotary:
            draft.defaults[f"--{name}"] = f"{value}, as in {file}; {OF_MEGATRON}"


def _llama(draft: Draft) -> Sizes:
    line = draft.line
    width, heads, grouped = line.get("hidden-size"), line.get("num-attention-heads"), line.get("group-query-attention")
    ff = line.get("ffn-hidden-size") or int(4 * width * 2 / 3 / 64) * 64
    channels = line.get("kv-channels")
    if not grouped:
        draft.ignore("num-query-groups", "without --group-query-attention it counts for nothing, as in Megatron-LM")
    if not line.get("use-rope-scaling"):
        draft.ignore("rope-scaling-factor", "without --use-rope-scaling it counts for nothing, as in Megatron-LM")
    draft.ignore("max-position-embeddings", "rotary positions have no table")
    groups = ("num-query-groups", "group-query-attention") if grouped else ("group-query-attention",)
    scaling = ("use-rope-scaling", "rope-scaling-factor") if line.get("use-rope-scaling") else ("use-rope-scaling",)
    factor = line.get("rope-scaling-factor") if line.get("use-rope-scaling") else 1.0
    tied = not line.get("untie-embeddings-and-output-weights")
    sizes: Sizes = {
        "width": (width, ("hidden-size",), OF_MEGATRON),
        "layers": (line.get("num-layers"), ("num-layers",), OF_MEGATRON),
        "heads": (heads, ("num-attention-heads",), OF_MEGATRON),
        "kv_heads": (
            line.get("num-query-groups") if grouped else heads,
            groups,
            f"{OF_MEGATRON}: as many as --num-attention-heads",
        ),
        "ff": (ff, ("ffn-hidden-size",), f"{OF_MEGATRON}: 8/3 x --hidden-size, down to a multiple of 64"),
        "head_size": (
            channels if channels and channels * heads != width else 0,
            ("kv-channels",),
            f"{OF_MEGATRON}: --hidden-size / --num-attention-heads",
        ),
        "norm_epsilon": (line.get("norm-epsilon"), ("norm-epsilon",), OF_MEGATRON),
        "rope_theta": (line.get("rotary-base"), ("rotary-base",), OF_MEGATRON),
        "rope_factor": (factor, scaling, OF_MEGATRON),
        "tied": (tied, ("untie-embeddings-and-output-weights",), f"{OF_MEGATRON}: embedding and output are one matrix"),
    }
    return sizes


def _gpt(draft: Draft) -> Sizes:
    line = draft.line
    width, heads, seq = line.get("hidden-size"), line.get("num-attention-heads"), line.get("seq-length")
    copy = "leave it out, or copy models/gpt.py and write it there"
    if line.get("untie-embeddings-and-output-weights"):
        rule = "models/gpt.py has one matrix for embedding and output"
        draft.refuse(f"--untie-embeddings-and-output-weights: {rule}; {copy}")
    groups = line.get("num-query-groups") if line.get("group-query-attention") else heads
    if groups != heads:
        rule = "models/gpt.py has as many key/value heads as heads"
        draft.refuse(f"--group-query-attention --num-query-groups {groups}: {rule}; {copy}")
    channels = line.get("kv-channels")
    if channels and channels * heads != width:
        rule = f"models/gpt.py has heads of --hidden-size / --num-attention-heads = {width // heads}"
        draft.refuse(f"--kv-channels {channels}: {rule}; {copy}")
    for name in ("group-query-attention", "num-query-groups"):
        draft.ignore(name, "as many groups as heads")
    draft.ignore("kv-channels", "--hidden-size / --num-attention-heads, as it is")
    for name in ("rotary-base", "use-rope-scaling", "rope-scaling-factor"):
        draft.ignore(name, "without rotary positions it counts for nothing, as in Megatron-LM")
    for name, value in (
        ("num-query-groups", f"{heads} key/value heads, as many as heads"),
        ("untie-embeddings-and-output-weights", "embedding and output are one matrix"),
    ):
        if name not in line.given:
            draft.defaults[f"--{name}"] = f"{value}, as in models/gpt.py; {OF_MEGATRON}"
    positions = line.get("max-position-embeddings") or seq
    return {
        "width": (width, ("hidden-size",), OF_MEGATRON),
        "layers": (line.get("num-layers"), ("num-layers",), OF_MEGATRON),
        "heads": (heads, ("num-attention-heads",), OF_MEGATRON),
        "max_positions": (positions, ("max-position-embeddings",), f"{CHOSEN}: --seq-length"),
        "ff": (line.get("ffn-hidden-size") or 4 * width, ("ffn-hidden-size",), f"{OF_MEGATRON}: 4 x --hidden-size"),
        "norm_epsilon": (line.get("norm-epsilon"), ("norm-epsilon",), OF_MEGATRON),
    }


def _padded(draft: Draft, size: int) -> int:
    """To a multiple that every tensor parallel rank can share, as Megatron-LM does."""
    unit = draft.line.get("make-vocab-size-divisible-by") * draft.line.get("tensor-model-parallel-size")
    return math.ceil(size / unit) * unit


def _vocabulary(draft: Draft) -> Vocabulary:
    line = draft.line
    flags, unit = ("vocab-size", "make-vocab-size-divisible-by"), line.get("make-vocab-size-divisible-by")
    given, kind = line.get("vocab-size"), line.get("tokenizer-type")
    if padded := line.get("padded-vocab-size"):
        for name in (*flags, "tokenizer-type"):
            draft.ignore(name, "--padded-vocab-size says the size")
        return Vocabulary(padded, (padded,), ("padded-vocab-size",), OF_MEGATRON)
    if given is None and kind in VOCABULARIES:
        exact = VOCABULARIES[kind]
        return Vocabulary(
            _padded(draft, exact), (_padded(draft, exact), exact), ("tokenizer-type", *flags), OF_MEGATRON
        )
    if given is None:
        draft.ignore("tokenizer-type", "how many tokens it has does not follow from its name")
        padding = f"padded to a multiple of {unit} x --tensor-model-parallel-size"
        return Vocabulary(None, (), flags[:1], f"{CHOSEN}: GPT-2's {GPT2:,}, {padding}")
    if kind == "NullTokenizer":  # it adds a token that ends documents
        return Vocabulary(_padded(draft, given + 1), (_padded(draft, given + 1), given), (*flags, "tokenizer-type"), "")
    draft.ignore("tokenizer-type", "--vocab-size says the size")
    return Vocabulary(_padded(draft, given), (_padded(draft, given), given), flags, "")


def _equal_preset(presets: Mapping[str, Any], sizes: Sizes, vocabulary: Vocabulary) -> Any:
    """The preset with all these sizes, apart from padding; None where there is none."""
    for preset in presets.values():
        values = {name: value for name, (value, _, _) in sizes.items()}
        if hasattr(preset, "F") and values["ff"] == 4 * values["width"]:
            values["ff"] = 0  # as the preset says it
        same = dataclasses.replace(type(preset)(**values, vocab_size=preset.vocab_size), name=preset.name) == preset
        if same and (vocabulary.size is None or preset.vocab_size in vocabulary.presets):
            return preset
    return None


def _use_preset(draft: Draft, preset: Any, sizes: Sizes, vocabulary: Vocabulary) -> None:
    size = vocabulary.size
    draft.keys["model.name"] = preset.name, f"{', '.join(f'--{name}' for name in SIZE_FLAGS)}, ... are this preset's"
    for field, (value, names, default) in [
        *sizes.items(),
        ("vocab_size", (preset.vocab_size, vocabulary.flags, CHOSEN)),
    ]:
        draft.use("model.name", *names)
        if not set(names) & draft.line.given.keys():
            draft.defaults[f"--{names[0]}"] = f"{field} = {value}, as {preset.name} has it; {default}"
    if size is None:
        draft.ignore("make-vocab-size-divisible-by", "parallax pads the vocabulary by itself")
    elif size != preset.vocab_size:
        what = f"Megatron-LM pads the vocabulary of {preset.vocab_size:,} to {size:,}"
        draft.deviations.append(f"{what}; parallax pads by itself, outside of the softmax")


def _nearest_preset(presets: Mapping[str, Any], values: dict[str, Any]) -> str:
    """By number of parameters. Raises ValueError where the sizes do not make a model."""
    kind = type(next(iter(presets.values())))
    parameters = kind(**values).shape().parameters
    distance = lambda name: abs(math.log(presets[name].shape().parameters / parameters))
    return min(presets, key=distance)
