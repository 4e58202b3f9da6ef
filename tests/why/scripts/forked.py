"""Starts the ranks of a script as forks of one process, which has loaded torch for all of them.

    python forked.py SCRIPT RANKS

It waits for all of them, and fails if one has.  Lightning takes them for ranks of torchrun.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

import torch.nn.parallel  # noqa: F401 - loaded once, for all ranks

if "lightning" in open(sys.argv[1]).read():  # noqa: SIM115
    import lightning.pytorch  # noqa: F401


def main() -> None:
    script, num_ranks = sys.argv[1], int(sys.argv[2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    pids = []
    for rank in range(int(os.environ.get("STARTED_RANKS", num_ranks))):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            sys.argv = [script]
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(any(statuses))


main()
