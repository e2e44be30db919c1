"""`parallax plan`: what it prints and writes, and every kind of wrong request in one clear line."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

import parallax
from parallax.cli import main
from parallax.config import Model, load
from parallax.machine import MESHES
from parallax.model_files import load_model
from parallax.plan.command import add_arguments
from parallax.plan.estimate import estimate
from parallax.plan.job import read_job
from parallax.plan.request import read_request, tokens_of
from parallax.plan.search import Request, fits
from parallax.plan.show import print_view
from parallax.validate import resolve

BATCH = "--seq-len 8192 --global-batch-size 512"
SEVENTY = "--model llama3-70b --devices 64 --seq-len 8192 --global-batch-size 512"
EIGHT = "--model llama3-8b --devices 8 --seq-len 8192 --global-batch-size 512"


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]):
    """words → (status, stdout, stderr)"""

    def run(words: str, *more: str) -> tuple[int, str, str]:
        status = main(["plan", *words.split(), *more])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_the_seventy_billion_on_sixty_four(plan):
    status, out, _ = plan(SEVENTY)
    assert status == 0
    assert "70.6 B parameters x 18 bytes" in out and "1,182.7 GiB" in out  # 70.55e9 x 18 / 2^30
    for number, question in enumerate(
        ("Does it fit", "Tensor", "A pipeline", "Context", "What is left", "Does the batch"), 1
    ):
        assert f"\n{number}. {question}" in out
    assert "rule of thumb: worth it from a width of 4096" in out and "from about 50 layers" in out
    assert "what would change it: with" in out and "GiB more HBM" in out
    assert "bubble (p-1)/(v·m)" in out and "ZeRO-3, not built yet" in out
    assert "NVIDIA's guide, TP4·PP4·CP2: " in out and "nearest that does not fit: " in out


def test_json(plan):
    status, out, err = plan(EIGHT, "--json")
    facts = json.loads(out)
    assert status == 0 and out.count("\n") == 1 and err == ""
    first, second = facts["candidates"][:2]
    assert first.keys() >= {"parallel", "train", "step_time_s", "mfu", "memory_gib", "reasons"}
    assert first["step_time_s"] <= second["step_time_s"] * 1.005 and first["reasons"][0] == "the choice"
    assert 0 < first["mfu"] < 1 and first["memory_gib"] <= 0.92 * facts["hbm_gib"]
    assert facts["nearest_infeasible"]["lacking_gib"] > 0
    assert first["tokens_per_s"] == pytest.approx(512 * 8192 / first["step_time_s"])
    assert [step["question"][:4] for step in facts["steps"]] == ["Does", "Tens", "A pi", "Cont", "What", "Does"]


def test_the_run_file_is_the_plan(plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = plan(SEVENTY, "--json", "-o", "run.toml")
    choice = json.loads(out)["candidates"][0]
    config, text = load("run.toml"), Path("run.toml").read_text()
    for section in ("parallel", "train"):
        for key, value in choice[section].items():
            assert getattr(getattr(config, section), key) == value, key
    assert resolve("run.toml").machine.platform == "gpu"
    made = estimate(read_job("run.toml"))
    assert made.step_time_s == pytest.approx(choice["step_time_s"]) and made.peak_bytes / 2**30 == choice["memory_gib"]
    assert text.startswith("# Written by parallax plan: llama3-70b on 64 x h100-sxm.") and "# A pipeline? pp" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert plan(SEVENTY, "-o", "run.toml")[0] == 0  # its own file is written again
    assert not [path for path in tmp_path.iterdir() if path.name != "run.toml"]


def test_the_other_files(plan, tmp_path: Path):
    status, out, _ = plan(EIGHT, "--markdown", str(tmp_path / "plan.md"), "--html", str(tmp_path / "plan.html"))
    assert status == 0 and f"wrote {tmp_path}/plan.md" in out and f"wrote {tmp_path}/plan.html" in out
    text = (tmp_path / "plan.md").read_text()
    assert text.startswith("# llama3-8b on 8 x h100-sxm\n") and "## 3. A pipeline?" in text and "| layout | v |" in text
    assert "<html" in (tmp_path / "plan.html").read_text()


def test_auto_finds_the_devices_and_days_are_counted(plan):
    status, out, _ = plan(f"--model llama3-8b --devices auto {BATCH} --tokens 1T --json")
    facts = json.loads(out)
    assert status == 0 and facts["devices"] == 2
    assert facts["days"] == pytest.approx(1e12 / facts["candidates"][0]["tokens_per_s"] / 86_400)
    status, out, _ = plan(
        "--model llama3-8b --seq-len 8192 --global-batch-size 512 --tokens 1T --target-days 30 --json"
    )
    assert json.loads(out)["days"] <= 30 < 2.2 * json.loads(out)["days"]


def test_pins_that_change_nothing_are_in_the_run_file_too(plan, tmp_path: Path):
    file = tmp_path / "run.toml"
    pins = ["parallel.pp=1", "parallel.schedule=gpipe", "parallel.zero=1", "parallel.virtual_stages=1"]
    assert plan(f"--model llama3-8b --devices 64 {BATCH}", *pins, "-o", str(file))[0] == 0
    written = tomllib.loads(file.read_text())["parallel"]
    assert (written["pp"], written["schedule"], written["zero"], written["virtual_stages"]) == (1, "gpipe", 1, 1)
    assert load(file).parallel.schedule == "gpipe"


def test_a_model_whose_name_has_line_breaks(plan, tmp_path: Path):
    source = (Path(parallax.__file__).parent / "models/llama.py").read_text()
    name = 'name="a\\nb = 1\\x00\\u2028c",'
    named = re.sub(r"(?<=ModelShape\()\s*name=[^,]+,", lambda _: name, source)
    assert named != source
    (tmp_path / "model.py").write_text(named)
    file = tmp_path / "run.toml"
    words = EIGHT.replace("--model ", f"--model-file {tmp_path}/model.py --model ")
    assert plan(words, "-o", str(file))[0] == 0
    assert file.read_text().startswith("# Written by parallax plan: a b = 1 c on 8 x h100-sxm.\n")
    assert tomllib.loads(file.read_text())["model"]["name"] == "llama3-8b"


def test_where_one_file_cannot_be_written_none_is(plan, tmp_path: Path):
    long = tmp_path / f"{'x' * 300}.html"
    status, out, err = plan(EIGHT, "-o", str(tmp_path / "run.toml"), "--html", str(long))
    assert status == 2 and out == "" and err.count("\n") == 1 and "File name too long" in err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("figure", "devices", "refused"),
    [
        ("hbm_bytes_per_s", 8, True),
        ("link_inside_bytes_per_s", 8, True),
        ("link_across_bytes_per_s", 16, True),
        ("link_across_bytes_per_s", 8, False),  # where it is not needed
        ("link_inside_bytes_per_s", 1, False),
    ],
)
def test_a_figure_of_the_mesh_that_is_not_known(plan, tmp_path: Path, figure: str, devices: int, refused: bool):
    text = (MESHES / "b200.toml").read_text()
    (tmp_path / "mine.toml").write_text(re.sub(rf"(?m)^{figure} = \S+", f"{figure} = 0", text))
    words = f"--model llama3-8b {BATCH} --mesh-file {tmp_path}/mine.toml"
    status, _, err = plan(f"{words} --devices {devices}")
    said = f"error: mesh b200: {figure} = 0, for not known, and this layout's time cannot be priced without; use a mesh"
    assert (status, err.startswith(said), err.count("\n")) == ((2, True, 1) if refused else (0, False, 0))


def test_a_mesh_without_peaks(plan, tmp_path: Path):
    text = (MESHES / "b200.toml").read_text()
    (tmp_path / "mine.toml").write_text(re.sub(r"(?m)^(bfloat16|float32) = .*", "", text))
    status, _, err = plan(f"{EIGHT} --mesh-file {tmp_path}/mine.toml")
    assert status == 2 and "has no peak FLOP/s in the mesh b200; use a --mesh-file that gives it" in err


def test_more_positions_than_the_model_learned(plan, tmp_path: Path):
    words = "--model gpt3-175b --devices 128 --seq-len 4096 --global-batch-size 512"
    status, _, err = plan(words, "-o", str(tmp_path / "run.toml"))
    assert status == 0
    assert err == (
        "note: --seq-len 4096 is more than the 2048 learned positions of gpt3-175b; planned with "
        "model.max_positions = 4096\n"
    )
    assert resolve(tmp_path / "run.toml").shape.max_positions == 4096


def test_pins_and_overrides(plan):
    status, out, _ = plan(EIGHT, "parallel.tp=2", "train.remat=full", "model.layers=16", "--json")
    facts = json.loads(out)
    assert status == 0 and facts["overrides"] == {"layers": 16}
    assert {c["parallel"]["tp"] for c in facts["candidates"]} == {2}
    assert {c["train"]["remat"] for c in facts["candidates"]} == {"full"}


def test_the_guides_own_layout_or_why_not(plan):
    words = "--model deepseek-v3 --devices 1024 --seq-len 4096 --global-batch-size 512"
    assert (
        "NVIDIA's guide, TP2·PP16·EP64 is refused: 2 x 16 x 64 = 2048 does not divide 1,024 devices" in plan(words)[1]
    )


@pytest.mark.parametrize(
    ("text", "count"), [("2T", 2e12), ("300B", 3e11), ("1.5e12", 1.5e12), ("8000", 8000), ("5m", 5e6)]
)
def test_numbers_of_tokens(text: str, count: float):
    assert tokens_of(text) == pytest.approx(count)


def _request_of(words: str) -> Request:
    options = argparse.ArgumentParser()
    add_arguments(options)
    return read_request(options.parse_args(words.split()))[0]


# Wrong requests: words that are added to (or stand in for) a right one, status, what the line says

ALONE = [
    ("--devices 64 --seq-len 8192 --global-batch-size 512", "--model is missing; use for example --model llama3-70b"),
    (f"--model llama3-70b {BATCH}", "--devices is missing; use for example --devices 64 or auto"),
    ("--model llama3-70b --devices 64 --global-batch-size 512", "--seq-len is missing; use for example --seq-len 8192"),
    ("--model llama3-70b --devices 64 --seq-len 8192", "--global-batch-size is missing; use for example"),
    (f"--model llama3-71b --devices 64 {BATCH}", '--model "llama3-71b" is not a preset of models/; use llama3-70b'),
    (f"--model llama3-70b --devices 0 {BATCH}", "--devices 0 must be at least 1; use 1 or more"),
    (f"--model llama3-70b --devices -8 {BATCH}", "--devices -8 must be at least 1; use 1 or more"),
    (f"--model llama3-70b --devices many {BATCH}", '--devices "many" is not an integer; use for example 64 or auto'),
    (f"--model llama3-70b --devices 64.5 {BATCH}", '--devices "64.5" is not an integer'),
    (
        f"--model llama3-70b --devices 999999999 {BATCH}",
        "--devices 999999999 must be at most 131072; use 131072",
    ),
    (f"--model llama3-70b --devices 1013 {BATCH}", "--devices 1013: no product dp x pp x ep x cp x tp of it is legal"),
    (
        "--model llama3-8b --devices 1 --seq-len 1024 --global-batch-size 2000000000",
        "microbatches x stages are at most 1000000); use 125 devices",
    ),
    ("--model llama3-70b --devices 64 --seq-len 0 --global-batch-size 512", "--seq-len 0 must be at least 1"),
    ("--model llama3-70b --devices 64 --seq-len 8k --global-batch-size 512", '--seq-len "8k" is not an integer'),
    (
        f"--model mixtral-8x7b model.layers=3 --devices 64 {BATCH}",
        "model.layers = 3: mixtral-8x7b is here as data",
    ),
    (f"--model llama3-70b {BATCH} --target-days 30", "--target-days needs --tokens"),
    (
        f"--model llama3-70b {BATCH} --target-days 0 --tokens 2T",
        "--target-days 0 must be a number of days",
    ),
    (
        f"--model llama3-70b {BATCH} --target-days 30 --tokens 2X",
        '--tokens "2X" is not a number of tokens; use',
    ),
    (
        f"--model llama3-70b --devices 64 {BATCH} --target-days 30 --tokens 2T",
        "--target-days finds the devices",
    ),
]
ADDED = [
    ("--mesh h100", '--mesh "h100" is not a machine of meshes/; use h100-sxm or a --mesh-file'),
    ("--mesh cpu", "--mesh cpu has no memory and speed of its own to plan with; use a machine such as h100-sxm"),
    ("--mesh tpu-v5p --precision float32", "--precision float32 has no peak FLOP/s in the mesh tpu-v5p; use bfloat16"),
    ("--mesh-file nothing.toml", "nothing.toml: No such file or directory"),
    ("--headroom 100", "--headroom 100 must be a percentage of at least 0 and less than 100"),
    ("--headroom lots", '--headroom "lots" is not a number'),
    ("--top 0", "--top 0 must be at least 1"),
    ("-o no/run.toml", "-o no/run.toml: the folder no does not exist; make it first"),
    ("-o pyproject.toml", "-o pyproject.toml is there and not a plan's; remove it, or use another name"),
    ("--html same --markdown same", "--markdown and --html both name same; use two files"),
    ("foo", '"foo" is not key=value; use for example parallel.tp=4'),
    ("train.steps=3", "train.steps cannot be fixed here"),
    ("model.layer=3", "model.layer = 3 is not a field of the model's Config; use model.layers"),
    (
        "parallel.tp=3",
        "parallel.tp = 3 must divide the devices, the model's heads and widths, and a node; use 1",
    ),
    ("parallel.tp=big", 'parallel.tp = "big" must be an integer'),
    ("parallel.pp=3", "parallel.pp = 3 leaves no legal layout of 64 devices for --global-batch-size 512; use 1, 2, 4"),
    (
        "parallel.tp=4 parallel.pp=32",
        "parallel: pp 32 x tp 4 leaves no legal layout of 64 devices for a batch of 512; use pp 2, 4, 8 or 16 or t",
    ),
    ("parallel.cp=32 --seq-len 96", "parallel.cp = 32 must cut a sequence of 96 in two equal chunks a rank, and divid"),
    ("parallel.tp=2 --seq-len 8191", "parallel.tp = 2 must divide a sequence of 8191, as sequence parallelism cuts it"),
    ("model.kv_heads=3", "model.kv_heads = 3 does not divide model.heads = 64; use"),
    ("model.heads=0", "model.heads = 0 must be at least 1"),
    ("model.name=x", 'model.name = "x" is given by an option; use --model "x"'),
    ("--tokens 1.2.3", '--tokens "1.2.3" is not a number of tokens; use'),
    ("--tokens .", '--tokens "." is not a number of tokens; use'),
    (
        "--tokens 9e17",
        "--tokens 9e17 are 214,576,721,192 steps, and a run has at most 2,147,483,647; use 9.01e+15 or le",
    ),
    (f"--devices {'9' * 5000}", "9999 must be at most 131072; use 131072 or less"),
    (f"--seq-len -{'9' * 5000}", "9999 must be at least 1; use 1 or more"),
    (f"--global-batch-size {'9' * 5000}", "9999 must be at most 2147483647"),
    ("-o /dev/full", "-o /dev/full is a device and is not written to; use the name of a new file"),
    ("parallel.ep=2", "parallel.ep = 2 needs a model with experts; use 1"),
    ("parallel.cp=3", "parallel.cp = 3 must cut a sequence of 8192 in two equal chunks a rank"),
    ("parallel.pp=100", "parallel.pp = 100 is more than the model's 80 layers"),
    (
        "parallel.virtual_stages=50",
        "parallel.virtual_stages = 50 needs a pipeline of at least 2 ranks and at most 80 layers // 2 = 40 chunks on",
    ),
    (
        "parallel.schedule=gpipe parallel.virtual_stages=2",
        "parallel.virtual_stages = 2 needs parallel.schedule",
    ),
    ("parallel.schedule=zb", 'parallel.schedule = "zb" cannot be planned with; use 1f1b, interleaved or gpipe'),
    ("train.micro_batch_size=3", "train.micro_batch_size = 3 does not divide any replica's share"),
    ("train.remat=some", 'train.remat = "some" is not a choice of this release; use "none", "selective" or "full"'),
]


@pytest.mark.parametrize(("words", "said"), [*ALONE, *((f"{SEVENTY} {words}", said) for words, said in ADDED)])
def test_wrong_requests(plan, words: str, said: str):
    status, out, err = plan(words)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("error: ") and said in err, err


def test_too_large_with_what_is_fixed_still_says_sizes(plan):
    status, out, err = plan(f"--model llama3.1-405b --devices 8 {BATCH}", "train.remat=none")
    assert status == 1 and out == "" and "remat none, needs " in err and "use --devices " in err


def test_device_days_at_full_peak(plan):
    """6 x parameters and attention FLOPs a token, over 989.4e12 FLOP/s."""
    status, _, err = plan(f"--model llama3-8b {BATCH} --target-days 0.001 --tokens 2T")
    flops = 2e12 * load_model(Model(name="llama3-8b"))[1].shape().train_flops_per_token(8192)
    days = flops / 989.4e12 / 86_400
    assert status == 1 and f"that is {days:,.0f} device-days at full peak, {1000 * days:,.0f} devices" in err


@pytest.mark.parametrize("devices", ["64", "auto"])
@pytest.mark.parametrize(
    "pin",
    [
        *("parallel.tp=3", "parallel.dp=3", "parallel.ep=2", "parallel.cp=3", "parallel.pp=100"),
        *("parallel.virtual_stages=99", "train.micro_batch_size=1000"),
    ],
)
def test_every_value_that_a_refusal_offers_can_be_planned_with(plan, devices: str, pin: str):
    words = f"--model llama3-70b --devices {devices} {BATCH}"
    status, _, err = plan(words, pin)
    offered = re.findall(r"\d+", err.rpartition("; use ")[2])
    assert status == 2 and err.count("\n") == 1 and offered
    key = pin.partition("=")[0]
    for value in offered:
        assert _request_of(f"{words} {key}={value}").pins[key.partition(".")[2]] == int(value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model llama3-70b --devices 1000 --seq-len 1000 --global-batch-size 1 parallel.pp=5", "use 40 devices"),
        (
            "--model llama3-70b --devices 127 --seq-len 8192 --global-batch-size 1024 parallel.dp=3",
            "use 126 or 128 devices",
        ),
        (
            "--model deepseek-v3 --mesh h200-sxm --devices 512 --seq-len 127 --global-batch-size 7 parallel.ep=8",
            "parallel.ep = 8 must divide the model's experts, the devices and --global-batch-size 7; use 1",
        ),
        (
            "--model llama3-8b --devices 1013 --seq-len 8192 --global-batch-size 512 parallel.virtual_stages=4",
            "use 896 or 1024 devices",
        ),
    ],
)
def test_where_nothing_near_is_legal(plan, words: str, said: str):
    status, out, err = plan(words)
    assert status == 2 and out == "" and said in err
    assert all(line.startswith("error: ") for line in err.splitlines())


def test_every_problem_is_listed(plan):
    status, _, err = plan("--model llama3-71b --mesh h100 --devices x --seq-len 8k --global-batch-size 512 foo")
    assert status == 2 and len(err.splitlines()) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model llama3-70b --devices 8", "llama3-70b fits nowhere on 8 x h100-sxm: the leanest layout, tp8, "),
        (
            "--model llama3-8b --devices 1",
            "in the way are moments 59.8 GiB and masters 29.9 GiB; use --devices 2",
        ),
        ("--model llama3-70b --devices 16 --mesh tpu-v5e", "fits nowhere on 16 x tpu-v5e"),
        (
            "--model llama3-70b --target-days 0.01 --tokens 2T",
            "no number of h100-sxm of those tried up to 32,768 trains on 2e+12 tokens in 0.01 days",
        ),
    ],
)
def test_what_fits_nowhere_says_what_would_do(plan, words: str, said: str):
    status, out, err = plan(f"{words} {BATCH}")
    assert status == 1 and out == "" and err.count("\n") == 1 and said in err, err


@pytest.mark.parametrize("columns", ["0", "1", "40", "200"])
def test_a_terminal_of_any_width(monkeypatch: pytest.MonkeyPatch, columns: str):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    widths: list[int] = []
    print_view(lambda width: widths.append(width) or "shown")
    assert widths == [max(40, int(columns))] and terminal.getvalue() == "shown\n"


def test_what_is_pinned_and_has_to_be_found(plan):
    """Numbers of devices that no node is a part of."""
    status, out, _ = plan(f"--model llama3-70b --devices auto {BATCH} --json", "parallel.pp=7")
    facts = json.loads(out)
    assert status == 0 and facts["devices"] % 7 == 0
    request = _request_of(f"--model llama3-70b --devices auto {BATCH} parallel.pp=7")
    assert facts["devices"] == min(n for n in range(1, 225) if fits(dataclasses.replace(request, devices=n)))


def test_a_headroom_is_not_rounded(plan):
    status, _, err = plan(f"{EIGHT} --headroom 99.9")
    assert status == 1 and "(99.9% headroom)" in err and "no number of devices of those tried up to 32,768" in err
