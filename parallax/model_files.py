"""Model files by name: find the preset, import its file, apply the run file's overrides.

Importing a model file imports jax and flax, but starts no backend; nothing here imports jax itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

from parallax.config import INT_MAX, ConfigError, Model, either, show, suggest, value_problem
from parallax.layout import LOGICAL
from parallax.shape import LayerShape, ModelShape, Weight

A = TypeVar("A")
T = TypeVar("T")
MODELS = Path(__file__).parent / "models"
PARTS = ("Block", "Embed", "Head", "context")
MAX_LAYERS = 10_000


def load_model(model: Model) -> tuple[ModuleType, Any]:
    """The model file's module and the preset's Config with its overrides. Raises ConfigError with every problem."""
    module, preset = _own_preset(model) if model.file else _known_preset(model)
    config = _apply(model, preset)
    if not _is_shape(config.shape()):
        rule = "must return a parallax.shape.ModelShape with tuples of LayerShapes and of Weights, and integers in them"
        raise ConfigError([f"{_where(model)}: Config.shape() {rule}"])
    return module, config


def _is_shape(shape: Any) -> bool:
    """Whether it is one whose every size is an integer, with weights that name known axes."""
    if not isinstance(shape, ModelShape) or not isinstance(shape.layers, tuple):
        return False
    sizes = [getattr(shape, name) for name in ("vocab_size", "width", "max_positions")]
    weights = [shape.embed, shape.head]
    for layer in set(shape.layers):
        if not isinstance(layer, LayerShape):
            return False
        fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        weights.append(fields.pop("weights"))
        sizes += fields.values()
    return all(type(size) is int for size in sizes) and all(map(_are_weights, weights))


def _are_weights(weights: Any) -> bool:
    return isinstance(weights, tuple) and all(
        isinstance(weight, Weight)
        and len(weight.shape) == len(weight.axes)
        and all(type(size) is int for size in weight.shape)
        and set(weight.axes) <= LOGICAL.keys()
        for weight in weights
    )


def _where(model: Model) -> str:
    return f"model.file = {show(model.file)}" if model.file else f"model.name = {show(model.name)}"


def _known_preset(model: Model) -> tuple[ModuleType, Any]:
    """Looks for the preset in each file of models/, in order of name."""
    names: list[str] = []
    for path in sorted(MODELS.glob("[!_]*.py")):
        module = _import(f"models/{path.name}", importlib.import_module, f"parallax.models.{path.stem}")
        if model.name in module.PRESETS:
            return module, module.PRESETS[model.name]
        names += module.PRESETS
    raise ConfigError([f"model.name = {show(model.name)} is not a preset of models/; use {suggest(model.name, names)}"])


def _own_preset(model: Model) -> tuple[ModuleType, Any]:
    where, path = _where(model), Path(model.file)
    if not os.path.isfile(path) or path.suffix != ".py":
        raise ConfigError([f"{where} is not a Python file; use an existing one, such as a copy of models/llama.py"])
    spec = importlib.util.spec_from_file_location(f"parallax_model_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    _import(where, spec.loader.exec_module, module)
    presets = getattr(module, "PRESETS", None)
    if not isinstance(presets, dict) or not presets or not all(isinstance(name, str) for name in presets):
        raise ConfigError([f"{where} has no presets; give it PRESETS = {{{show(model.name)}: Config(...)}}"])
    if model.name not in presets:
        use = suggest(model.name, presets)
        raise ConfigError([f"model.name = {show(model.name)} is not a preset of {model.file}; use {use}"])
    if missing := [part for part in PARTS if not callable(getattr(module, part, None))]:
        raise ConfigError([f"{where} has no {', '.join(missing)}; define {', '.join(PARTS)} as models/llama.py does"])
    preset = presets[model.name]
    if not dataclasses.is_dataclass(preset) or isinstance(preset, type) or not callable(getattr(preset, "shape", None)):
        rule = "must be an instance of a dataclass Config with a shape(), as in models/llama.py"
        raise ConfigError([f"{where}: PRESETS[{show(model.name)}] {rule}"])
    return module, preset


def _import(where: str, load: Callable[[A], T], what: A) -> T:
    """`load(what)`. Whatever a model file raises is a fact about that file."""
    try:
        return load(what)
    except (Exception, SystemExit) as error:
        why = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else _one_line(error)
        raise ConfigError([f"{where} cannot be imported; correct {type(error).__name__}: {why}"]) from error


def _apply(model: Model, preset: Any) -> Any:
    """The preset with the overrides, type-checked; `shape()` is called once, so that it works from here on."""
    problems, values = [], {}
    try:
        hints = get_type_hints(type(preset))
    except Exception as error:
        raise ConfigError([f"{_where(model)}: the annotations of Config cannot be read; {_why(error)}"]) from error
    known = [field.name for field in dataclasses.fields(preset)]
    for name, value in model.overrides.items():
        if name not in known:
            use = suggest(name, known, "model.")
            problems.append(f"model.{name} = {show(value)} is not a field of the model's Config; use {use}")
        elif problem := value_problem(
            f"model.{name}", value, hints[name], getattr(preset, name), _bounds(preset, name)
        ):
            problems.append(problem)
        else:
            values[name] = _frozen(float(value) if hints[name] is float else value)
    if problems:
        raise ConfigError(problems)
    try:
        config = dataclasses.replace(preset, **values)
        config.shape()
    except (Exception, SystemExit) as error:  # a Config may check itself
        given = ", ".join(f"model.{name} = {show(value)}" for name, value in values.items()) or model.name
        usual = ", ".join(f"{name} = {show(getattr(preset, name))}" for name in values) or either(known)
        raise ConfigError([f"{given} does not make a model: {_why(error)}; the preset has {usual}"]) from error
    return config


def _bounds(preset: Any, name: str) -> dict[str, float]:
    """An integer of a Config is a size: 1 or more, or 0 where that is what it is by default."""
    (field,) = (field for field in dataclasses.fields(preset) if field.name == name)
    usual = [value for value in (getattr(preset, name), field.default) if type(value) is int]
    return {"at_least": min(1, *usual), "fits": MAX_LAYERS if name == "layers" else INT_MAX} if usual else {}


def _frozen(value: Any) -> Any:
    """TOML arrays as tuples: a Config is hashable."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _why(error: BaseException) -> str:
    """A ValueError speaks for itself: a Config that checks itself raises it."""
    return _one_line(error) if type(error) is ValueError else f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
