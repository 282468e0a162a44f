"""Several processes meet, and part without leaving a thread behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

AS_A_RUN_DOES = """
import os
from pathlib import Path
import torch
from outrider.training.world import join_world, leave_world
world, device = join_world("cpu")
import torch.distributed.nn.functional  # transformers does, once it loads a model
assert [world.any(flag, torch.device(device)) for flag in (world.is_first, False)] == [True, False]
def threads():
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
during = sum("gloo" in name for name in threads())
leave_world()
after = sum("gloo" in name for name in threads())
os.write(1, f"rank {world.rank} of {world.size}: {during > 0} {after}\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_no_thread_of_the_group_outlives_it(tmp_path) -> None:
    """One that does may meet the end of Python: `terminate called without an active exception`."""
    script = tmp_path / "part.py"
    script.write_text(AS_A_RUN_DOES)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [sys.executable, *start],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: True 0", "rank 1 of 2: True 0"]
