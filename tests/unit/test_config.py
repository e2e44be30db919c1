"""Run files: reading, overrides, types, writing back, and the table in docs/config.md."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.config import (
    SECTIONS,
    ConfigError,
    Optimizer,
    RunConfig,
    build,
    key,
    keys_of,
    load,
    markdown_tables,
    to_toml,
)

ROOT = Path(__file__).parents[2]
MINIMAL = """
[model]
name = "llama-tiny"
[train]
steps = 10
seq_len = 128
global_batch_size = 24
[log]
dir = "runs/x"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_defaults_and_derived_values(tmp_path: Path):
    config = load(write(tmp_path, MINIMAL), ["parallel.dp=2", "parallel.pp=3", "train.micro_batch_size=4"])
    assert isinstance(config, RunConfig)
    assert (config.devices, config.microbatches) == (6, 3)
    assert config.optimizer.learning_rate == 3e-4 and config.mesh.name == "cpu"


def test_overrides_are_toml_or_bare_strings(tmp_path: Path):
    overrides = [
        "train.steps=20",
        "log.dir=/tmp/x",
        "mesh.name='b200'",
        "optimizer.clip_norm=2",
        "parallel.sequence_parallel=false",
        "model.layers=16",
        "model.tied=true",
        "model.note=a=b",
    ]
    config = load(write(tmp_path, MINIMAL), overrides)
    assert (config.train.steps, config.log.dir, config.mesh.name) == (20, "/tmp/x", "b200")
    assert config.optimizer.clip_norm == 2.0 and type(config.optimizer.clip_norm) is float
    assert config.parallel.sequence_parallel is False
    assert config.model.overrides == {"layers": 16, "tied": True, "note": "a=b"}


def test_written_file_reads_back_equal(tmp_path: Path):
    overrides = [
        "log.dir='a\"b\\c \u00e9'",
        "optimizer.epsilon=1e-16",
        "model.widths=[1, 2]",
        "model.rope={ 'a b' = 1.5 }",
    ]
    config = load(write(tmp_path, MINIMAL), overrides)
    assert load(write(tmp_path, to_toml(config))) == config


def test_files_are_relative_to_the_run_file_and_on_the_command_line_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "sub", MINIMAL + '[mesh]\nfile = "m.toml"\n')
    config = load(path, ["model.file=mine.py"])
    assert config.mesh.file == str(tmp_path / "sub" / "m.toml")
    assert config.model.file == str(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=true", "train.steps = true must be an integer"),
        ("train.steps=2.0", "train.steps = 2.0 must be an integer; use 2"),
        ("train.steps='20'", 'train.steps = "20" must be an integer; use 20'),
        ("parallel.skip_idle=1", "parallel.skip_idle = 1 must be true or false; use true"),
        ("parallel.zero=true", "parallel.zero = true is not a choice of this release; use 0 or 1"),
        ("log.dir=1", 'log.dir = 1 must be a string; use "1"'),
        ("optimizer.learning_rate=nan", "= nan must be a finite number greater than 0; use 0.0003"),
        ("optimizer.learning_rate=inf", "= inf must be a finite number greater than 0; use 0.0003"),
        ("optimizer.learning_rate='-1'", "must be a finite number greater than 0; use 0.0003"),
        ("optimizer.learning_rate=1e31", "= 1e+31 must be at most 1e+30; use 1e+30 or less"),
        (f"optimizer.weight_decay=1{'0' * 400}", "00...00"),
        (f"train.steps=1{'0' * 5000}", "train.steps = "),
        ("train.steps=-1.5", "train.steps = -1.5 must be an integer at least 1; use 1"),
        ("train.steps=1e300", "train.steps = 1e+300 must be an integer at least 1; use 2147483647"),
        ("train.steps=3000000000", "must be at most 2147483647; use 2147483647 or less"),
        ("train.steps=2\nfoo=1", 'train.steps = "2\\nfoo=1" must be an integer'),
        ("train.steps=", "train.steps has no value; write train.steps=20"),
        ("=3", 'override "=3" is not section.key=value; use for example train.steps=20'),
        ("a.b.c=1", 'override "a.b.c=1" is not section.key=value; use for example train.steps=20'),
        ("optimizer.beta2=1", "optimizer.beta2 = 1 must be at least 0 and less than 1; use for example 0.95"),
        ("parallel.tp=0", "parallel.tp = 0 must be at least 1; use 1 or more"),
        ("optimizer.min_learning_rate_ratio=2", "must be at least 0 and at most 1; use 1 or less"),
        ("parallel.tpp=2", "parallel.tpp = 2 is not a known key; use parallel.tp"),
        ("train.learning_rate=2", "train.learning_rate = 2 is not a known key; use optimizer.learning_rate"),
        ("tp=4", 'override "tp=4" is not section.key=value; use parallel.tp=4'),
        ("paralel.tp=4", 'override "paralel.tp=4" is not section.key=value; use parallel.tp=4'),
        ("train.steps", 'override "train.steps" is not section.key=value; use train.steps=20'),
    ],
)
def test_one_problem(tmp_path: Path, override: str, expected: str):
    (problem,) = problems(tmp_path, MINIMAL, override)
    assert expected in problem


def test_all_problems_at_once(tmp_path: Path):
    text = "tp = 3\n[paralel]\ntp = 1\n[model]\n[train]\nsteps = 0\nseq_len = 8\n[parallel]\nschedule = 3\n"
    assert problems(tmp_path, text) == [
        "tp = 3 stands outside of its section; use parallel.tp",
        "[paralel] is not a known section; use parallel",
        "model.name is missing and has no default; set it to a string",
        'parallel.schedule = 3 must be a string; use "3"',
        "train.steps = 0 must be at least 1; use 1 or more",
        "train.global_batch_size is missing and has no default; set it to an integer at least 1",
        "log.dir is missing and has no default; set it to a string",
    ]


def test_a_value_in_place_of_a_section_is_one_problem(tmp_path: Path):
    text = 'train = 3\n[model]\nname = "llama-tiny"\n[log]\ndir = "runs/x"\n'
    assert problems(tmp_path, text) == ["train = 3 is not a section; write [train] and its keys below it"]


def test_what_is_read_as_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "bom.toml"
    path.write_text(MINIMAL, encoding="utf-8-sig")
    assert load(path, ["log.dir=~/x"]).log.dir == str(tmp_path / "x")


def test_files_that_cannot_be_read(tmp_path: Path):
    assert "nested too deeply" in problems(tmp_path, f"a = {'[' * 5000}")[0]
    assert "line 2" in problems(tmp_path, "[train]\nsteps = = 3\n")[0]
    for path in (tmp_path, tmp_path / "missing.toml"):
        with pytest.raises(ConfigError, match=str(path)):
            load(path)
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load(tmp_path / "latin.toml")


def test_docs_have_the_tables_of_the_dataclasses():
    text = (ROOT / "docs" / "config.md").read_text()
    assert text.endswith(markdown_tables()), "write the output of parallax.config.markdown_tables() to docs/config.md"
    assert sum(len(keys_of(section)) for section in SECTIONS.values()) < 90


def test_no_jax():
    modules = "parallax.config, parallax.machine, parallax.validate, parallax.model_files, parallax.shape"
    program = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Required:
    share: float = key(dataclasses.MISSING, "without a default", above=0, below=1)
    table: Optimizer | None = key(None, "a table or nothing")  # noqa: RUF009


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"share": 0}, "share = 0 must be greater than 0 and less than 1"),
        ({"share": 1}, "share = 1 must be greater than 0 and less than 1"),
        ({"share": 0.5, "table": 3}, "table = 3 must be a table"),
    ],
)
def test_a_value_without_an_example(table: dict, line: str):
    assert [*build(Required, table)[1].values()] == [line]
