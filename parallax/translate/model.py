"""The model of a command line: which file of models/ computes it, and the preset or the sizes that make it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from parallax.config import Model, show
from parallax.model_files import load_model
from parallax.translate.mapping import CHOSEN, OF_MEGATRON, Draft

# By flag, what models/llama.py has; without any of them the model is that of models/gpt.py.
LLAMA = {
    "--position-embedding-type rope": "rotary positions",
    "--normalization RMSNorm": "RMSNorm",
    "--swiglu": "SwiGLU",
    "--disable-bias-linear": "no biases",
}
GPT = {
    "--position-embedding-type": "learned positions",
    "--normalization": "LayerNorm",
    "--swiglu": "GELU",
    "--disable-bias-linear": "biases",
}
VOCABULARIES = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}
GPT2 = VOCABULARIES["GPT2BPETokenizer"]


class Size(NamedTuple):
    """A field of the model's Config, and where it comes from: flags, or a default where none of them was given."""

    value: Any
    flags: tuple[str, ...]
    default: str = OF_MEGATRON


class Vocabulary(NamedTuple):
    """`size` is padded, and None where nothing says it; `presets` are the sizes of a preset that it may be."""

    size: int | None
    presets: tuple[int, ...]
    flags: tuple[str, ...]
    default: str = OF_MEGATRON


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
    try:
        if preset := _equal_preset(presets, sizes, vocabulary):
            _use_preset(draft, preset, sizes, vocabulary)
            return
        size = Size(vocabulary.size or _padded(draft, GPT2), vocabulary.flags, vocabulary.default)
        sizes = {"vocab_size": size, **sizes}
        name = _nearest_preset(presets, sizes)
    except ValueError as error:
        draft.refuse(f"model.{error}")
        return
    if vocabulary.size is None:
        draft.use("model.vocab_size", "make-vocab-size-divisible-by")
    draft.keys["model.name"] = name, "the preset nearest in size; its own sizes are replaced"
    for field, size in sizes.items():
        draft.set(f"model.{field}", size.value, *size.flags, default=size.default)


def _family(draft: Draft) -> str | None:
    """`llama` or `gpt`. One default that does not go with the other flags is a deviation; more, or a flag that
    contradicts them, is refused."""
    line = draft.line
    positions, norm = line.get("position-embedding-type"), line.get("normalization")
    rotary = line.get("use-rotary-position-embeddings") or positions == "rope"
    if positions not in ("rope", "learned_absolute") and not rotary:
        rule = "models/ has rotary and learned positions; use rope or learned_absolute"
        draft.refuse(f"--position-embedding-type {positions}: {rule}")
        return None
    has = (rotary, norm == "RMSNorm", line.get("swiglu"), line.get("disable-bias-linear"))
    given = [flag for flag, yes in zip(LLAMA, has, strict=True) if yes]
    lacks = [flag for flag in LLAMA if flag not in given]
    draft.use("model.name", "position-embedding-type", "use-rotary-position-embeddings", "normalization")
    draft.use("model.name", "swiglu", "disable-bias-linear")
    draft.ignore("add-qkv-bias", "every product has a bias")
    if not given:
        for flag, what in GPT.items():
            if flag[2:] not in line.given:
                draft.defaults[flag] = f"{what}, as in models/gpt.py; {OF_MEGATRON}"
        return "gpt"
    against = ["--position-embedding-type learned_absolute"] * ("position-embedding-type" in line.given and not rotary)
    against += ["--normalization LayerNorm"] * ("normalization" in line.given and norm == "LayerNorm")
    if len(lacks) > 1 or against:
        rule = f"with {' '.join(against) or 'the defaults'} is in no file of models/"
        use = f"add {' '.join(lacks)} for models/llama.py, or leave {' '.join(given)} out for models/gpt.py"
        draft.refuse(f"{' '.join(given)} {rule}; {use}")
        return None
    for flag in lacks:
        draft.deviations.append(f"no {flag}: Megatron-LM's default differs; models/llama.py has {LLAMA[flag]}")
    if "add-qkv-bias" in line.given and "--disable-bias-linear" in given:
        draft.refuse("--add-qkv-bias: models/llama.py has no biases; leave it out")
    return "llama"


def _llama(draft: Draft) -> dict[str, Size]:
    line = draft.line
    width, heads, grouped = line.get("hidden-size"), line.get("num-attention-heads"), line.get("group-query-attention")
    ff = line.get("ffn-hidden-size") or int(4 * width * 2 / 3 / 64) * 64
    head_size = line.get("kv-channels") or width // heads
    kv_heads = line.get("num-query-groups") if grouped else heads
    if not grouped:
        draft.ignore("num-query-groups", "without --group-query-attention it counts for nothing, as in Megatron-LM")
    if not line.get("use-rope-scaling"):
        draft.ignore("rope-scaling-factor", "without --use-rope-scaling it counts for nothing, as in Megatron-LM")
    draft.ignore("max-position-embeddings", "rotary positions have no table")
    groups = ("num-query-groups", "group-query-attention") if grouped else ("group-query-attention",)
    scaling = ("use-rope-scaling", "rope-scaling-factor") if line.get("use-rope-scaling") else ("use-rope-scaling",)
    factor = line.get("rope-scaling-factor") if line.get("use-rope-scaling") else 1.0
    tied = not line.get("untie-embeddings-and-output-weights")
    tie = f"{OF_MEGATRON}: embedding and output are one matrix"
    return {
        "width": Size(width, ("hidden-size",)),
        "layers": Size(line.get("num-layers"), ("num-layers",)),
        "heads": Size(heads, ("num-attention-heads",)),
        "kv_heads": Size(kv_heads, groups, f"{OF_MEGATRON}: as many as --num-attention-heads"),
        "ff": Size(ff, ("ffn-hidden-size",), f"{OF_MEGATRON}: 8/3 x --hidden-size, down to a multiple of 64"),
        "head_size": Size(head_size, ("kv-channels",), f"{OF_MEGATRON}: --hidden-size / --num-attention-heads"),
        "norm_epsilon": Size(line.get("norm-epsilon"), ("norm-epsilon",)),
        "rope_theta": Size(line.get("rotary-base"), ("rotary-base",)),
        "rope_factor": Size(factor, scaling),
        "tied": Size(tied, ("untie-embeddings-and-output-weights",), tie),
    }


def _gpt(draft: Draft) -> dict[str, Size]:
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
    four = f"{OF_MEGATRON}: 4 x --hidden-size"
    return {
        "width": Size(width, ("hidden-size",)),
        "layers": Size(line.get("num-layers"), ("num-layers",)),
        "heads": Size(heads, ("num-attention-heads",)),
        "max_positions": Size(positions, ("max-position-embeddings",), f"{CHOSEN}: --seq-length"),
        "ff": Size(line.get("ffn-hidden-size") or 4 * width, ("ffn-hidden-size",), four),
        "norm_epsilon": Size(line.get("norm-epsilon"), ("norm-epsilon",)),
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
        return Vocabulary(padded, (padded,), ("padded-vocab-size",))
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
        return Vocabulary(_padded(draft, given + 1), (_padded(draft, given + 1), given), (*flags, "tokenizer-type"))
    draft.ignore("tokenizer-type", "--vocab-size says the size")
    return Vocabulary(_padded(draft, given), (_padded(draft, given), given), flags)


def _equal_preset(presets: Mapping[str, Any], sizes: Mapping[str, Size], vocabulary: Vocabulary) -> Any:
    """The preset with all these sizes, apart from padding; None where there is none. Raises ValueError where the sizes
    do not make a model."""
    for preset in presets.values():
        values = {name: size.value for name, size in sizes.items()}
        made = type(preset)(**values, vocab_size=preset.vocab_size, name=preset.name)
        said = [f.name for f in dataclasses.fields(preset) if getattr(preset, f.name) != 0]  # shape() has the others
        same = made.shape() == preset.shape() and all(getattr(made, name) == getattr(preset, name) for name in said)
        if same and (vocabulary.size is None or preset.vocab_size in vocabulary.presets):
            return preset
    return None


def _use_preset(draft: Draft, preset: Any, sizes: Mapping[str, Size], vocabulary: Vocabulary) -> None:
    draft.keys["model.name"] = preset.name, "--num-layers, --hidden-size, --num-attention-heads, ... are this preset's"
    for field, size in {**sizes, "vocab_size": Size(preset.vocab_size, vocabulary.flags, CHOSEN)}.items():
        draft.use("model.name", *size.flags)
        if not set(size.flags) & draft.line.given.keys():
            draft.defaults[f"--{size.flags[0]}"] = f"{field} = {show(size.value)}, as in {preset.name}; {size.default}"
    if vocabulary.size is None:
        draft.ignore("make-vocab-size-divisible-by", "parallax pads the vocabulary by itself")
    elif vocabulary.size != preset.vocab_size:
        what = f"Megatron-LM pads the vocabulary of {preset.vocab_size:,} to {vocabulary.size:,}"
        draft.deviations.append(f"{what}; parallax pads by itself, outside of the softmax")


def _nearest_preset(presets: Mapping[str, Any], sizes: Mapping[str, Size]) -> str:
    """By number of parameters. Raises ValueError where the sizes do not make a model."""
    kind = type(next(iter(presets.values())))
    parameters = kind(**{name: size.value for name, size in sizes.items()}).shape().parameters
    return min(presets, key=lambda name: abs(math.log(presets[name].shape().parameters / parameters)))
