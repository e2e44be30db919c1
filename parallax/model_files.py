"""Model files by name: find the preset, import its file, apply the run file's overrides.

Importing a model file imports jax and flax, but starts no backend; nothing here imports jax itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

from parallax.config import ConfigError, Model, either, show, suggest, value_problem

A = TypeVar("A")
T = TypeVar("T")
MODELS = Path(__file__).parent / "models"


def load_model(model: Model) -> tuple[ModuleType, Any]:
    """The model file's module and the preset's Config with its overrides. Raises ConfigError with every problem."""
    module, preset = _own_preset(model) if model.file else _known_preset(model)
    return module, _apply(model, preset)


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
    where, path = f"model.file = {show(model.file)}", Path(model.file)
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError([f"{where} is not a Python file; use an existing one, such as a copy of models/llama.py"])
    spec = importlib.util.spec_from_file_location(f"parallax_model_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    _import(where, spec.loader.exec_module, module)
    presets = getattr(module, "PRESETS", None)
    if not isinstance(presets, dict) or not presets:
        raise ConfigError([f"{where} has no presets; give it PRESETS = {{{show(model.name)}: Config(...)}}"])
    if model.name not in presets:
        use = suggest(model.name, presets)
        raise ConfigError([f"model.name = {show(model.name)} is not a preset of {model.file}; use {use}"])
    return module, presets[model.name]


def _import(where: str, load: Callable[[A], T], what: A) -> T:
    """`load(what)`. Whatever a model file raises is a fact about that file."""
    try:
        return load(what)
    except Exception as error:
        why = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else _one_line(error)
        raise ConfigError([f"{where} cannot be imported; correct {type(error).__name__}: {why}"]) from error


def _apply(model: Model, preset: Any) -> Any:
    """The preset with the overrides, type-checked; `shape()` is called once, so that it works from here on."""
    hints, problems, values = get_type_hints(type(preset)), [], {}
    known = [field.name for field in dataclasses.fields(preset)]
    for name, value in model.overrides.items():
        if name not in known:
            use = suggest(name, known, "model.")
            problems.append(f"model.{name} = {show(value)} is not a field of the model's Config; use {use}")
        elif problem := value_problem(f"model.{name}", value, hints[name], getattr(preset, name), {}):
            problems.append(problem)
        else:
            values[name] = _frozen(float(value) if hints[name] is float else value)
    if problems:
        raise ConfigError(problems)
    try:
        config = dataclasses.replace(preset, **values)
        config.shape()
    except Exception as error:  # a Config may check itself, or divide by a size that is 0
        given = ", ".join(f"model.{name} = {show(value)}" for name, value in values.items()) or model.name
        usual = ", ".join(f"{name} = {show(getattr(preset, name))}" for name in values) or either(known)
        why = f"{type(error).__name__}: {_one_line(error)}"
        raise ConfigError([f"{given} does not make a model: {why}; the preset has {usual}"]) from error
    return config


def _frozen(value: Any) -> Any:
    """TOML arrays as tuples: a Config is hashable."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
