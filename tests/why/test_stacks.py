"""Stacks of `faulthandler`, and the user's line in them."""

from __future__ import annotations

from pathlib import Path

from lightning_dsgd.why.causes import branch_by_rank
from lightning_dsgd.why.stacks import Frame, main_stack, users_frame

DUMP = """\
Thread 0x00007f01 (most recent call first):
  File "/x/threading.py", line 1 in wait

Current thread 0x00007f02 (most recent call first):
  File "/opt/site-packages/torch/nn/module.py", line 7 in forward
  File "/home/me/train.py", line 88 in training_step
  File "/home/me/train.py", line 120 in <module>

Thread 0x00007f03 (most recent call first):
  File "/home/me/other.py", line 2 in serve
"""


def test_the_main_threads_last_stack_is_read_wherever_it_stands() -> None:
    frames = main_stack(DUMP.replace("line 88", "line 87") + DUMP, "0x7f02")
    assert [frame.line for frame in frames] == [7, 88, 120]
    assert users_frame(frames) == Frame("/home/me/train.py", 88, "training_step")


def test_the_innermost_branch_by_the_rank_is_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "def step(self, x):\n"
        "    if x:\n"
        "        if self.trainer.is_global_zero:\n"
        "            log(x)\n"
        "    return x\n"
    )
    inside, outside = Frame(str(script), 4, "step"), Frame(str(script), 5, "step")
    branch = branch_by_rank([[outside], [inside]])
    assert branch is not None
    assert branch.line == 3
    assert branch_by_rank([[outside]]) is None
