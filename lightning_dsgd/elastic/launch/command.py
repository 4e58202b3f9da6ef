"""Starts a script once for each rank of a node, and looks after these processes.

    lightning-dsgd launch --ranks 8 train.py --its --own arguments
    lightning-dsgd launch --ranks 8 --nodes 2 --node 0 --rendezvous node0:29500 train.py    # node0
    lightning-dsgd launch --ranks 8 --nodes 2 --node 1 --rendezvous node0:29500 train.py    # node1
    lightning-dsgd launch --ranks 4 --join --rendezvous node0:29500 train.py     # later: 4 more
    lightning-dsgd launch --ranks 8 fit --config config.yaml     # in place of a script

Each rank finds torchrun's variables.  The ranks meet in a store that the supervisor keeps, so the
end of a rank, also of rank 0, does not end their meeting place.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final, NoReturn

from lightning_dsgd.elastic.launch.reserve import IMPORTS, has_to_import_by_itself

_COMMANDS: Final = ("fit", "validate", "test", "predict")
"""The commands of `lightning-dsgd` that ranks can run in place of a script."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        example = "; try lightning-dsgd launch --ranks 4 train.py"
        super().error(message + example * ("are required" in message))


def parser() -> argparse.ArgumentParser:
    """Returns what reads the command line."""
    parser = _Parser(
        prog="lightning-dsgd launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, required=True, help="how many on this node")
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        help="how many, with as many ranks each (default: %(default)s)",
    )
    parser.add_argument(
        "--node", type=int, default=0, help="the number of this one, from 0 (default: %(default)s)"
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        help="where the ranks meet: of node 0, which serves it; port 0 is any free one, "
        "for one node (default: %(default)s)",
    )
    parser.add_argument(
        "--join",
        action="store_true",
        help='these ranks join a training that goes on, with on_loss="continue" and max_ranks',
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path("launch_logs"),
        help="a folder: one file for each start (default: %(default)s)",
    )
    parser.add_argument(
        "--end-s",
        type=float,
        default=30.0,
        help="seconds for ranks to end by themselves, once they are to (default: %(default)s)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        help="how often a rank that is lost is started again, counted anew once it has trained for "
        '10 minutes, with on_loss="continue" (default: %(default)s)',
    )
    parser.add_argument(
        "--imports",
        metavar="MODULES",
        help="what one process of the node imports before ranks start from it; by default "
        f"{','.join(IMPORTS)}, but not for a script that sets paths or variables "
        'before it imports torch or Lightning; "" for nothing: each rank is a new interpreter',
    )
    parser.add_argument(
        "--notice",
        metavar="URL|FILE|COMMAND",
        help="what says that this machine is to be taken away, on which its ranks leave before "
        "their next batch: a page of a cloud's metadata, a file once it is there, a command once "
        "it ends with 0",
    )
    parser.add_argument("script", help=f"a Python file, or a command: {', '.join(_COMMANDS)}")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="for the script"
    ).required = False
    return parser


def main(argv: list[str] | None = None) -> None:
    """Runs until all ranks of this node have ended; exits with 0 if training has ended."""
    reads = parser()
    args = reads.parse_args(argv)
    # Lazily: a help text needs no torch.
    from lightning_dsgd.elastic.launch.node import Place
    from lightning_dsgd.elastic.launch.supervisor import Supervisor
    from lightning_dsgd.transport import TransportError

    try:
        host, port = _address(args.rendezvous)
        place = Place(args.ranks, args.nodes, args.node, host, port, args.join)
        is_command = args.script in _COMMANDS and not Path(args.script).exists()
        if not is_command and not Path(args.script).is_file():
            raise ValueError(f"the script must be a file, got {args.script}; name a Python file")
        command = [sys.executable, "-u", *(["-m", "lightning_dsgd"] if is_command else [])]
        command += [args.script, *args.arguments]
        if args.imports is not None:
            imports = [name for name in args.imports.split(",") if name]
        elif not is_command and has_to_import_by_itself(Path(args.script)):
            imports = []
        else:
            imports = list(IMPORTS)
        limits = args.end_s, args.max_restarts
        supervisor = Supervisor(command, place, args.logs, *limits, imports, args.notice)
        status = supervisor.run()
    except (ValueError, OSError, TransportError) as err:
        reads.error(str(err))
    raise SystemExit(status)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"--rendezvous must be an address and a port, got {text!r}; try node0:29500"
        )
    return host, int(port)
