"""Text that is read where it lies costs no memory of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MIB = 1 << 20
# Anonymous: memory that is this process's alone. Mapped pages of the file are the system's, to take back at any time.
PROGRAM = """
import json, sys
import parallax.config
from parallax.data import open_data
def anonymous_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous:"))
data = open_data(parallax.config.Data(source=sys.argv[1]), seq_len=1024, global_batch_size=16, vocab_size=256, seed=0)
for batch in data.train.iterate(0, [16] * 200):
    pass
print(json.dumps(anonymous_kib()))
"""


def memory_mib(source: str) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM, source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout) / 1024


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="this system does not say")
@pytest.mark.parametrize(
    ("size_mib", "most_mib"), [(64, 30), pytest.param(1024, 300, marks=pytest.mark.slow)], ids=["64 MiB", "1 GiB"]
)
def test_memory_of_a_text_file(tmp_path: Path, size_mib: int, most_mib: int):
    part = np.random.default_rng(0).integers(97, 123, MIB, np.uint8).tobytes()
    with (tmp_path / "text.txt").open("wb") as file:
        for _ in range(size_mib):
            file.write(part)
    assert memory_mib(str(tmp_path / "text.txt")) - memory_mib("synthetic") < most_mib
