"""Wrong run files. Each is refused with a line that names the value, the rule and what would work."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from parallax.config import ConfigError
from parallax.schedule import make_schedule, to_csv
from parallax.validate import check, check_devices, resolve

ROOT = Path(__file__).parents[2]
# llama-tiny has 8 layers, 4 heads, 2 key/value heads, ff 384 and a vocabulary of 256.
GOOD = {
    "model.name": '"llama-tiny"',
    "parallel.dp": "2",
    "parallel.pp": "2",
    "parallel.tp": "2",
    "train.steps": "10",
    "train.seq_len": "128",
    "train.global_batch_size": "8",
    "log.dir": '"runs/x"',
}
INTERLEAVED = {"parallel.schedule": '"interleaved"'}
NO_SEQUENCE = {"parallel.sequence_parallel": "false"}
CONFIG = """
from __future__ import annotations
from dataclasses import dataclass
Block = Embed = Head = context = print
@dataclass(frozen=True)
class Config:
    layers: {} = 1
    def shape(self):
        return 3
PRESETS = {{"llama-tiny": Config()}}
"""
MODEL_FILES = {
    "no_presets": "x = 1\n",
    "bad_syntax": "def f(:\n",
    "bad_import": "raise RuntimeError('two\\nlines')\n",
    "exits": "import sys; sys.exit(3)\n",
    "no_parts": "PRESETS = {'llama-tiny': 1}\n",
    "no_config": "Block = Embed = Head = context = print\nPRESETS = {'llama-tiny': 1}\n",
    "no_type": CONFIG.format("Missing"),
    "no_shape": CONFIG.format("int"),
}

SCHEDULES = {  # of two ranks
    "mine": "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
    "chunks": to_csv(make_schedule("interleaved", 2, 2, 4)),
    "ring": "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n",
}

# Keys that differ from GOOD (None: left out), and fragments of one line: the value, the rule, the nearest values.
WRONG = {
    "unknown key": ({"parallel.fsdp": "2"}, "parallel.fsdp = 2", "not a known key", "use parallel.dp"),
    "misspelt key": ({"train.sequence_len": "2"}, "train.sequence_len = 2", "not a known key", "use train.seq_len"),
    "unknown section": ({"optimiser.beta1": "0.9"}, "[optimiser]", "not a known section", "use optimizer"),
    "wrong section": ({"train.tp": "2"}, "train.tp = 2", "not a known key", "use parallel.tp"),
    "missing key": ({"train.steps": None}, "train.steps", "is missing", "set it to an integer at least 1"),
    "wrong type": ({"parallel.tp": '"2"'}, 'parallel.tp = "2"', "must be an integer", "use 2"),
    "bool as int": ({"train.steps": "true"}, "train.steps = true", "must be an integer", "use 1"),
    "not positive": ({"parallel.dp": "0"}, "parallel.dp = 0", "must be at least 1", "use 1 or more"),
    "not a fraction": ({"data.valid_fraction": "1.5"}, "= 1.5", "greater than 0 and less than 1", "0.05"),
    "learning rate": ({"optimizer.learning_rate": "0"}, "learning_rate = 0", "greater than 0", "0.0003"),
    "unknown schedule": (
        {"parallel.schedule": '"1f1"'},
        *('parallel.schedule = "1f1" is not a schedule', 'use "1f1b", "interleaved", "gpipe" or a .csv file'),
    ),
    "no schedule": ({"parallel.schedule": '""'}, 'parallel.schedule = "" is not a schedule', "or a .csv file"),
    "no such csv": ({"parallel.schedule": '"none.csv"'}, "parallel.schedule: ", "none.csv: No such file", "a CSV file"),
    "csv with a NUL": ({"parallel.schedule": '"a\\u0000.csv"'}, "not the path of a file", "use that of a CSV file"),
    "csv that cannot run": (
        {"parallel.schedule": '"ring.csv"'},
        *(
            "ring.csv: ranks wait for each other",
            'line 1, column 2: "0B0" waits for 1B0 (line 2, column 4)',
            "move one",
        ),
    ),
    "csv of other ranks": (
        {"parallel.schedule": '"mine.csv"', "parallel.pp": "4"},
        *("parallel.pp = 4", 'mine.csv" is for 2, the number of its lines', "use pp = 2"),
    ),
    "csv of other chunks": (
        {"parallel.schedule": '"mine.csv"', "parallel.virtual_stages": "2"},
        *(
            "parallel.virtual_stages = 2",
            'mine.csv" is for 1, the number of stages on a line',
            "use virtual_stages = 1",
        ),
    ),
    "csv of other microbatches": (
        {"parallel.schedule": '"mine.csv"', "train.global_batch_size": "16"},
        *("train.global_batch_size = 16 makes 8 microbatches", 'mine.csv" has 4', "use global_batch_size = 8"),
    ),
    "csv with a ramp": (
        {"parallel.schedule": '"mine.csv"', "train.rampup_batch_size": "[2, 2, 100]"},
        *("train.rampup_batch_size = [2, 2, 100]", 'mine.csv" fixes', "use rampup_batch_size = [] or a schedule of"),
    ),
    "csv on too many devices": (  # dp and pp are the file's
        {"parallel.schedule": '"mine.csv"', "parallel.dp": "256", "train.global_batch_size": "1024"},
        *("x dp 256 x", "= 1024, but at most 512 are emulated", "use parallel.tp = 1"),
    ),
    "heads by tp": ({"parallel.tp": "8"}, "parallel.tp = 8", "does not divide model.heads = 4", "use 1, 2 or 4"),
    "key/value heads by tp": (
        {"parallel.tp": "6", "model.heads": "36", "model.head_size": "32", "model.kv_heads": "9"}
        | {"model.ff": "36", "train.seq_len": "36"},
        *("parallel.tp = 6", "neither divides model.kv_heads = 9 nor is a multiple", "use 1, 3, 9, 18 or 36"),
    ),
    "ff by tp": ({"model.ff": "385"}, "parallel.tp = 2", "does not divide model.ff = 385", "use 1"),
    "sequence by tp": ({"train.seq_len": "127"}, "train.seq_len = 127", "parallel.tp = 2", "use 126 or 128"),
    "sequence by cp": (
        {"train.seq_len": "130", "parallel.cp": "4"},
        *("train.seq_len = 130 is not a multiple of 8", "parallel.cp = 4 with two chunks a rank", "use 128 or 136"),
    ),
    "sequence by cp and tp": (
        {"train.seq_len": "120", "parallel.cp": "4", "parallel.tp": "4"},
        *("= 120 is not a multiple of 16", "parallel.cp = 4", "and parallel.tp = 4 with sequence", "use 112 or 128"),
    ),
    "batch by dp": ({"train.global_batch_size": "7"}, "global_batch_size = 7", "parallel.dp 2", "use 6 or 8"),
    "batch below micro batch": ({"train.micro_batch_size": "8"}, "= 8 is not", "micro_batch_size 8 = 16", "use 16"),
    "more stages than layers": (
        INTERLEAVED | {"parallel.virtual_stages": "8"},
        *("parallel.virtual_stages 8 = 16", "more than model.layers = 8", "a product of at most 8"),
    ),
    "virtual stages in 1f1b": ({"parallel.virtual_stages": "2"}, "virtual_stages = 2", 'not "1f1b"', "= 1 or schedule"),
    "virtual stages without pp": (
        INTERLEAVED | {"parallel.virtual_stages": "2", "parallel.pp": "1"},
        *("parallel.virtual_stages = 2", "needs parallel.pp of 2 or more", "use virtual_stages = 1 or pp = 2"),
    ),
    "learned positions": (
        {"model.name": '"gpt-tiny"', "train.seq_len": "65536"},
        *("train.seq_len = 65536", "learned positions", "or less"),
    ),
    "expert parallel": ({"parallel.ep": "2"}, "parallel.ep = 2", "not built yet", "use 1"),
    "skip_idle with cp": (
        {"parallel.skip_idle": "true", "parallel.cp": "2"},
        *("skip_idle = true", "parallel.cp = 1, not 2", "cp = 1"),
    ),
    "skip_idle with tp": ({"parallel.skip_idle": "true"}, "skip_idle = true", "parallel.tp = 1, not 2", "tp = 1"),
    "too many devices": (
        {"parallel.dp": "1024", "train.global_batch_size": "1024"},
        *("pp 2 x dp 1024 x ep 1 x cp 1 x tp 2 = 4096", "at most 512 are emulated", "use parallel.dp = 128"),
    ),
    "tp beyond a gpu node": (
        {"mesh.name": '"h100-sxm"', "parallel.tp": "16", "model.heads": "16"},
        *("parallel.tp = 16", "8 devices of a node of h100-sxm", "use 1, 2, 4 or 8"),
    ),
    "unknown preset": ({"model.name": '"lama-tiny"'}, '"lama-tiny"', "not a preset", "use llama-tiny"),
    "unknown machine": ({"mesh.name": '"h100"'}, 'mesh.name = "h100"', "not a machine", "use h100-sxm"),
    "unknown model field": ({"model.n_layers": "4"}, "model.n_layers = 4", "not a field", "use model.layers"),
    "model field of another type": ({"model.layers": "4.5"}, "model.layers = 4.5", "must be an integer", "use 4"),
    "model that cannot be": (
        {"model.width": "30"},
        "model.width = 30 does not make",
        "head_size = 7 must be even",
        "= 6 or 8",
    ),
    "no heads": ({"model.heads": "0"}, "model.heads = 0", "must be at least 1", "use 1 or more"),
    "too many layers": ({"model.layers": "2147483648"}, "model.layers = 2147483648", "at most 10000", "10000 or less"),
    "learned positions by heads": (
        {"model.name": '"gpt-tiny"', "model.width": "130"},
        *("width = 130 is not a multiple of heads = 4", "use model.width = 128 or 132"),
    ),
    "rotary base": ({"model.rope_theta": "0"}, "rope_theta = 0.0 must be greater than 0", "10000"),
    "too long a schedule": ({"train.global_batch_size": "2000000"}, "= 2000000", "at most 1000000", "1000000 or less"),
    "ramp of two numbers": (
        {"train.rampup_batch_size": "[2, 2]"},
        *("rampup_batch_size = [2, 2] must be three integers of at least 1", "use [2, 2, 2000]"),
    ),
    "ramp of no samples": (
        {"train.rampup_batch_size": "[2, 2, 0]"},
        *("= [2, 2, 0]", "at least 1", "use [2, 2, 2000]"),
    ),
    "ramp of words": ({"train.rampup_batch_size": '["2", 2, 10]'}, '["2", 2, 10]', "must be a list", "use []"),
    "ramp from above": (
        {"train.rampup_batch_size": "[8, 2, 10]"},
        *("the start 8 must be less than train.global_batch_size = 8", "use a start of 4 or 6"),
    ),
    "ramp from between ranks": (
        {"train.rampup_batch_size": "[3, 2, 10]"},
        *("the start 3 is not a multiple of parallel.dp 2 x", "= 2; use a start of 2 or 4"),
    ),
    "ramp by less than the ranks": (
        {"train.rampup_batch_size": "[2, 3, 10]"},
        *("the increment 3 is not a multiple of parallel.dp 2 x", "= 2; use an increment of 2 or 6"),
    ),
    "ramp by what does not divide": (
        {"train.rampup_batch_size": "[2, 4, 10]"},
        *("the increment 4 does not divide train.global_batch_size 8 - 2 = 6", "use an increment of 2 or 6"),
    ),
    "ramp without room": (
        {"train.rampup_batch_size": "[4, 4, 10]", "train.micro_batch_size": "4"},
        *("no size below train.global_batch_size = 8 is a multiple of parallel.dp 2", "micro_batch_size 4 = 8; use []"),
    ),
    "checkpoints for good of no steps": (
        {"checkpoint.keep_every": "10"},
        *("checkpoint.keep_every = 10 needs", "checkpoint.every = 0", "use checkpoint.every = 10, or keep_every = 0"),
    ),
    "checkpoints for good that are missed": (
        {"checkpoint.keep_every": "10", "checkpoint.every": "4"},
        *("keep_every = 10", "not a multiple of checkpoint.every = 4", "use 8 or 12"),
    ),
    "no folder": ({"log.dir": '""'}, 'log.dir = ""', "not the name of a folder", "runs/x"),
    "folder with a NUL": ({"log.dir": '"a\\u0000"'}, 'log.dir = "a\\u0000"', "not the name of a folder"),
    "folder with a long name": ({"log.dir": f'"{"é" * 128}"'}, "a name of 256 bytes", "at most 255"),
    "folder of nobody": ({"log.dir": '"~no-such-user/x"'}, "~no-such-user/x", "not known; use another place"),
    "folder inside a file": ({"log.dir": f'"{__file__}/x"'}, "test_wrong_run_files.py, which is not a folder"),
    "folder that is a file": ({"log.dir": f'"{__file__}"'}, "is a file; use a folder that is empty or new"),
    "model file with a NUL": ({"model.file": '"a\\u0000.py"'}, "a\\u0000.py", "not a Python file"),
    "machine file with a NUL": ({"mesh.file": '"a\\u0000"'}, "a\\u0000", "a NUL character"),
    "decay that float32 rounds to 1": (
        {"optimizer.beta2": "0.9999999"},
        "beta2 = 0.9999999",
        "at most 0.999999; use 0.999999",
    ),
    "no peak": ({"mesh.name": '"tpu-v5e"', "train.precision": '"float32"'}, '"float32"', "no peak", 'use "bfloat16"'),
    "warm-up": ({"optimizer.warmup_steps": "11"}, "warmup_steps = 11", "at most train.steps = 10", "use 10 or less"),
    "no model file": ({"model.file": '"none.py"'}, "none.py", "not a Python file", "models/llama.py"),
    "model file without presets": ({"model.file": '"no_presets.py"'}, "no_presets.py", "no presets", "PRESETS ="),
    "model file with bad syntax": ({"model.file": '"bad_syntax.py"'}, "bad_syntax.py", "cannot be imported", "line 1"),
    "model file without blocks": ({"model.file": '"no_parts.py"'}, "no_parts.py", "no Block, Embed, Head, context"),
    "model file that exits": ({"model.file": '"exits.py"'}, "exits.py", "cannot be imported", "SystemExit: 3"),
    "preset of another type": ({"model.file": '"no_config.py"'}, "no_config.py", "an instance of a dataclass"),
    "config with unknown types": ({"model.file": '"no_type.py"'}, "no_type.py", "NameError", "Missing"),
    "shape of another type": (
        {"model.file": '"no_shape.py"'},
        "no_shape.py",
        "must return a parallax.shape.ModelShape",
    ),
    "model file that raises": ({"model.file": '"bad_import.py"'}, "bad_import.py", "RuntimeError", "two lines"),
}


def write(folder: Path, changes: Mapping[str, str | None]) -> Path:
    """A run file with GOOD's keys, changed."""
    sections: dict[str, list[str]] = {}
    for dotted, value in {**GOOD, **changes}.items():
        section, _, name = dotted.partition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{name} = {value}")
    path = folder / "run.toml"
    path.write_text("\n".join(line for name, keys in sections.items() for line in (f"[{name}]", *keys)))
    for name, text in MODEL_FILES.items():
        (folder / f"{name}.py").write_text(text)
    for name, text in SCHEDULES.items():
        (folder / f"{name}.csv").write_text(text)
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(path)
    return caught.value.problems


def test_the_good_one_is_good(tmp_path: Path):
    resolved = resolve(write(tmp_path, {}))
    assert (resolved.config.devices, resolved.config.microbatches, len(resolved.shape.layers)) == (8, 4, 8)


def test_schedules_from_files(tmp_path: Path):
    resolved = resolve(write(tmp_path, {"parallel.schedule": '"mine.csv"'}))
    assert resolved.config.parallel.schedule == str(tmp_path / "mine.csv")
    resolve(write(tmp_path, {"parallel.schedule": '"chunks.csv"', "parallel.virtual_stages": "2"}))
    (tmp_path / "one.csv").write_text("0F0,0B0,0F1,0B1\n")
    one = {"parallel.schedule": '"one.csv"', "parallel.pp": "1", "train.global_batch_size": "4"}
    resolve(write(tmp_path, one))


@pytest.mark.parametrize("name", WRONG)
def test_wrong(tmp_path: Path, name: str):
    changes, *fragments = WRONG[name]
    found = problems(write(tmp_path, changes))
    assert any(all(fragment in line for fragment in fragments) for line in found), found
    assert not any("\n" in line for line in found)


def test_problems_of_keys_model_and_machine_come_together(tmp_path: Path):
    changes = {
        "train.steps": "0",
        "parallel.ep": "2",
        "model.n_layers": "4",
        "mesh.name": '"h100"',
        "optimizer.warmup_steps": "20",
    }
    found = problems(write(tmp_path, changes))
    assert [line.split(" = ")[0].split(":")[0] for line in found] == [
        "train.steps",
        "mesh.name",
        "model.n_layers",
        "parallel.ep",  # and nothing of warm-up, which is measured by the wrong train.steps
    ]


def test_a_configuration_made_in_python_is_checked_too(tmp_path: Path):
    good = resolve(write(tmp_path, {}))
    assert check(good.config, good.shape, good.machine) == []
    wrong = replace(good.config, parallel=replace(good.config.parallel, tp=0))
    assert check(wrong, good.shape, good.machine) == ["parallel.tp = 0 must be at least 1; use 1 or more"]
    wrong = replace(good.config, parallel=replace(good.config.parallel, pp=16))
    assert len(check(wrong, good.shape, good.machine)) == 1


def test_device_equation(tmp_path: Path):
    resolved = resolve(write(tmp_path, {"parallel.dp": "3", "train.global_batch_size": "12"}))
    assert check_devices(resolved.config, 12, resolved.shape) == []
    assert check_devices(resolved.config, None, resolved.shape) == []
    (line,) = check_devices(resolved.config, 8, resolved.shape)
    product = "pp 2 x dp 3 x ep 1 x cp 1 x tp 2 = 12"
    assert line == f"parallel: devices = {product}, but 8 are available; use parallel.dp = 2"
    (line,) = check_devices(resolved.config, 7, resolved.shape)
    assert line.endswith("but 7 are available; use sizes whose product is 7")


@pytest.mark.parametrize("name", ["misspelt key", "heads by tp", "unknown preset"])
def test_command_line(tmp_path: Path, name: str):
    changes, *fragments = WRONG[name]
    command = [sys.executable, "-m", "parallax", "train", str(write(tmp_path, changes))]
    # A backend that does not exist: starting any would fail, with another message and status.
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "nonexistent"}
    )
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines and all(line.startswith("error: ") for line in lines), done.stderr
    assert any(all(fragment in line for fragment in fragments) for line in lines), done.stderr
