"""Machines: the eight that come along, the user's own, and files that are wrong."""

from pathlib import Path

import pytest

from parallax.config import ConfigError, MeshChoice
from parallax.machine import MESHES, Machine, load_machine, machine_names

GIB = 2**30
# Peak FLOP/s in bfloat16 and GiB of memory, as the vendors' product pages round them.
PUBLISHED = {
    "a100-80gb": (312e12, 80),
    "h100-sxm": (989e12, 80),
    "h200-sxm": (989e12, 141),
    "b200": (2.25e15, 180),
    "tpu-v5e": (197e12, 16),
    "tpu-v5p": (459e12, 95),
    "tpu-v6e": (918e12, 32),
}


FIGURES = {  # lines of the b200's file
    line.partition(" = ")[0]: line.partition("#")[0].rstrip()
    for line in (MESHES / "b200.toml").read_text().splitlines()
    if " = " in line.partition("#")[0]
}


def test_names():
    assert machine_names() == sorted([*PUBLISHED, "cpu"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures(name: str):
    machine = load_machine(MeshChoice(name=name))
    flops, memory_gib = PUBLISHED[name]
    assert machine.name == name
    assert machine.peak_flops["bfloat16"] == pytest.approx(flops, rel=0.001)
    assert machine.peak_flops.get("float32", 0) < flops / 4  # never TF32
    assert machine.hbm_bytes / GIB == pytest.approx(memory_gib, rel=0.02)
    assert machine.link_across_bytes_per_s <= machine.link_inside_bytes_per_s < machine.hbm_bytes_per_s
    assert (machine.link_across_slices_bytes_per_s > 0) == (machine.platform == "tpu")
    assert machine.compile_target["kind"] == {"gpu": "cuda", "tpu": "tpu"}[machine.platform]


@pytest.mark.parametrize("name", [*PUBLISHED, "cpu"])
def test_every_figure_has_a_comment(name: str):
    for line in (MESHES / f"{name}.toml").read_text().splitlines():
        value = line.partition(" = ")[2]
        if value[:1].isdigit():
            assert "#" in value, f"{name}: {line}"


def test_cpu_has_no_peak():
    machine = load_machine(MeshChoice())
    assert machine.platform == "cpu" and machine.peak_flops == {}


def own(folder: Path, old: str = "", new: str = "") -> MeshChoice:
    path = folder / "mine.toml"
    path.write_text((MESHES / "b200.toml").read_text().replace(old, new))
    return MeshChoice(file=str(path))


def test_own_file(tmp_path: Path):
    machine = load_machine(own(tmp_path, "devices_per_node = 8", "devices_per_node = 4"))
    assert isinstance(machine, Machine) and machine.devices_per_node == 4


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            'platform = "gpu"',
            'platform = "cuda"',
            'platform = "cuda" is not a choice of this release; use "cpu", "gpu"',
        ),
        ("hbm_bytes =", "hbm_byte =", "hbm_byte = 191514411008 is not a known key; use"),
        ("hbm_bytes =", "hbm_byte =", "hbm_bytes is missing and has no default; set it to an integer"),
        ("bfloat16 =", "bf16 =", "peak_flops.bf16 = 2250000000000000.0 is not a known precision; use bfloat16"),
        ("75e12", "-75e12", "peak_flops.float32 = -75000000000000.0 must be greater than 0"),
        ("devices_per_node = 8", "devices_per_node = 0", "devices_per_node = 0 must be at least 1"),
        ("[peak_flops]", "[peak_flops", "not TOML"),
        ("75e12", "1", "peak_flops.float32 = 1 must be at least 1000000.0 and at most 1e+18; use 1000000.0 or more"),
        ("75e12", "1e308", "peak_flops.float32 = 1e+308 must be at least 1000000.0 and at most 1e+18; use 1e+18 or"),
        ("devices_per_node = 8", "devices_per_node = 5000", "devices_per_node = 5000 must be at least 1 and at most 4"),
        (
            FIGURES["link_inside_bytes_per_s"],
            "link_inside_bytes_per_s = 1e-300",
            "link_inside_bytes_per_s = 1e-300 must be 0, for not known, o",
        ),
        (
            FIGURES["link_inside_bytes_per_s"],
            "link_inside_bytes_per_s = 1e308",
            "link_inside_bytes_per_s = 1e+308 must be at least 0 and at m",
        ),
        (
            FIGURES["hbm_bytes_per_s"],
            "hbm_bytes_per_s = 1",
            "hbm_bytes_per_s = 1.0 must be 0, for not known, or at least 1000000.0",
        ),
        (
            FIGURES["hbm_bytes"],
            "hbm_bytes = 10000000000000000",
            "must be at least 0 and at most 1000000000000000; use 10000",
        ),
        (
            FIGURES["matmul"],
            "matmul = 0",
            "efficiency.matmul = 0 must be at least 0.001 and at most 1; use 0.001 or more",
        ),
        (
            FIGURES["kernel_s"],
            "kernel_s = 4",
            "efficiency.kernel_s = 4 must be at least 0 and at most 1; use 1 or less",
        ),
        (
            FIGURES["latency_across_s"],
            "latency_across_s = 20",
            "efficiency.latency_across_s = 20 must be at least 0 and at most 1",
        ),
        (FIGURES["wave"], "wave = 1e10", "efficiency.wave = 10000000000.0 must be at least 0 and at most 1000000000.0"),
    ],
)
def test_wrong_files(tmp_path: Path, old: str, new: str, expected: str):
    with pytest.raises(ConfigError) as caught:
        load_machine(own(tmp_path, old, new))
    assert any(expected in problem and "mine.toml" in problem for problem in caught.value.problems), caught.value


def test_a_table_that_is_none(tmp_path: Path):
    path = tmp_path / "mine.toml"
    text = (MESHES / "b200.toml").read_text()
    head, _, rest = text.partition("[efficiency]")
    target = rest[rest.index("[compile_target]") :]
    path.write_text(f"efficiency = 3\n{head}{target}")
    with pytest.raises(ConfigError) as caught:
        load_machine(MeshChoice(file=str(path)))
    assert caught.value.problems == [f"{path}: efficiency = 3 must be a table"]


def test_unknown_name():
    with pytest.raises(ConfigError) as caught:
        load_machine(MeshChoice(name="h100"))
    assert caught.value.problems[0].startswith('mesh.name = "h100" is not a machine of meshes/; use h100-sxm')


def test_a_machine_with_a_peak_says_what_of_it_is_reached(tmp_path: Path):
    text = (MESHES / "b200.toml").read_text()
    start, stop = text.index("[efficiency]"), text.index("[compile_target]")
    with pytest.raises(ConfigError) as error:
        load_machine(own(tmp_path, text[start:stop], ""))
    assert error.value.problems == [
        f"{tmp_path}/mine.toml: [efficiency] is missing; copy that of the nearest machine in meshes/"
    ]
    with pytest.raises(ConfigError, match=r"mine.toml: efficiency.matmul = 75 must be .* at most 1; use 1 or less"):
        load_machine(own(tmp_path, "matmul = 0.63", "matmul = 75"))
    with pytest.raises(ConfigError, match=r"efficiency.matmull = 0.75 is not a known key; use efficiency.matmul"):
        load_machine(own(tmp_path, "matmul = 0.63", "matmull = 0.75"))


@pytest.mark.parametrize(
    ("mesh", "old", "new", "said"),
    [
        ("tpu-v5p", 'topology = "v5p"', "", "compile_target.topology is missing; copy that of the nearest machine"),
        ("tpu-v5p", '"v5p"', '"v4"', 'compile_target.topology = "v4" must be v5e, v5p or v6e; use for example "v5p"'),
        (
            "tpu-v5p",
            "[compile_target]",
            "[compile_target]\noops = 3",
            "compile_target.oops = 3 is not a key of a tpu's",
        ),
        (
            "h100-sxm",
            '"9.0"',
            '"ten"',
            'compile_target.capability = "ten" must be two numbers with a point between; use',
        ),
        (
            "h100-sxm",
            "cores = 132 ",
            'cores = "many"',
            'compile_target.cores = "many" must be a number greater than 0; use',
        ),
    ],
)
def test_a_wrong_compile_target(mesh: str, old: str, new: str, said: str, tmp_path: Path):
    text = (MESHES / f"{mesh}.toml").read_text()
    head, _, target = text.partition("\n[compile_target]")
    target = f"\n[compile_target]{target}"
    assert old in target
    (tmp_path / "own.toml").write_text(head + target.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        load_machine(MeshChoice(file=str(tmp_path / "own.toml")))
    (line,) = error.value.problems
    assert said in line


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('platform = "tpu"', 'platform = "npu"', 'platform = "npu"'),
        ("[compile_target]", "[efficiency.x]", "is missing"),
    ],
)
def test_nothing_is_said_of_a_compile_target_that_is_not_known(old: str, new: str, said: str, tmp_path: Path):
    (tmp_path / "own.toml").write_text((MESHES / "tpu-v5p.toml").read_text().replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        load_machine(MeshChoice(file=str(tmp_path / "own.toml")))
    assert any(said in line for line in error.value.problems)
    assert not any("compile_target." in line for line in error.value.problems)
