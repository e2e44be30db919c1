"""A Megatron-LM command line to a run file: mapped, checked by the rules of both, and written as TOML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallax.config import SECTIONS, ConfigError, MeshChoice, RunConfig, build, keys_of, show
from parallax.machine import Machine, load_machine
from parallax.model_files import load_model
from parallax.rules import check_checkpoints, check_layout, check_machine, check_model, check_schedule, check_sources
from parallax.translate.command_line import CommandLine, parse
from parallax.translate.mapping import CHOSEN, Draft, map_data, map_files, map_layout, map_training
from parallax.translate.model import map_model
from parallax.translate.refusals import REQUIRED, rule_refusals, size_refusals
from parallax.translate.shell import training_command
from parallax.validate import check_devices

MESH = "h100-sxm"


@dataclass(frozen=True)
class Translation:
    """`run_toml` is None where anything is refused. Every flag is a key of one of `mapped` (to keys of the run file),
    `ignored` and `refused`; `defaults` are of flags that were not given."""

    run_toml: str | None
    devices: int
    mapped: dict[str, list[str]]
    defaults: dict[str, str]
    ignored: dict[str, str]
    refused: dict[str, str]
    deviations: list[str]


def translate(
    text: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    mesh: str | None = None,
    folder: str = "",
) -> Translation:
    """`text` is a command line, or a script with its `arguments`. The run file is to be read in `folder`, relative to
    the working folder. Raises ConfigError where there is no command that trains, or no such mesh."""
    machine = load_machine(MeshChoice(name=mesh or MESH))
    line = parse(training_command(text, arguments, environment))
    draft = Draft(line, ignored=dict(line.ignored), deviations=list(line.deviations.values()))
    draft.refused |= line.refused
    draft.refuse(*size_refusals(line))
    if not (REQUIRED.keys() - line.given.keys() or size_refusals(line)):
        draft.refuse(*rule_refusals(line))
        map_layout(draft)
        map_training(draft)
        map_data(draft, folder)
        map_files(draft)
        map_model(draft)
        draft.keys["mesh.name"] = machine.name, "--mesh" if mesh else CHOSEN
    if not draft.refused:
        draft.refuse(*_problems(draft.keys, machine))
        draft.deviations += _node_problems(line, machine)
    return Translation(
        None if draft.refused else _toml(draft.keys),
        line.devices,
        {flag: keys for flag, keys in draft.mapped.items() if flag not in draft.refused},
        draft.defaults,
        draft.ignored,
        draft.refused,
        draft.deviations,
    )


def _problems(keys: Mapping[str, tuple[Any, str]], machine: Machine) -> list[str]:
    """What parallax's own rules say of the run file. `log.dir` is left out: it is of the machine that trains."""
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, (value, _) in keys.items():
        section, _, name = key.partition(".")
        tables[section][name] = value
    tables["model"] = {"name": tables["model"].pop("name"), "overrides": tables["model"]}
    sections, problems = {}, []
    for section, cls in SECTIONS.items():
        sections[section], wrong = build(cls, tables[section], f"{section}.")
        problems += wrong.values()
    config = RunConfig(**sections)
    try:
        shape = load_model(config.model)[1].shape()
    except ConfigError as error:
        return [*problems, *error.problems]
    return problems or [
        *check_layout(config),
        *check_schedule(config),
        *check_sources(config.data),
        *check_checkpoints(config),
        *check_model(config, shape),
        *check_machine(config, machine),
        *(check_devices(config, None, shape) if machine.platform == "cpu" else ()),
    ]


def _node_problems(line: CommandLine, machine: Machine) -> list[str]:
    if line.nodes == 1 or line.devices_per_node == machine.devices_per_node:
        return []
    given = f"{line.devices_per_node} devices a node"
    return [f"{given}: a node of {machine.name} has {machine.devices_per_node}; use --mesh for another machine"]


def _toml(keys: Mapping[str, tuple[Any, str]]) -> str:
    """The keys that are not the run file's own defaults, each with where it comes from."""
    lines = ["# By parallax translate, from a command line of Megatron-LM."]
    for section, cls in SECTIONS.items():
        fields = {f"{section}.{f.name}": f.default for f in keys_of(cls)}
        others = [key for key in keys if key.startswith(f"{section}.") and key not in fields]  # of the model's Config
        rows = [
            (f"{key.partition('.')[2]} = {show(keys[key][0])}", keys[key][1])
            for key in [*fields, *others]
            if key in keys and keys[key][0] != fields.get(key, dataclasses.MISSING)
        ]
        width = max((len(row) for row, _ in rows), default=0)
        if rows:
            lines += ["", f"[{section}]", *(f"{row:{width}}  # {where}" for row, where in rows)]
    return "\n".join(lines) + "\n"
