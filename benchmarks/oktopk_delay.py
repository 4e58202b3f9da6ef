"""How long sparse all-reduces hold gradients back, by the number of ranks.

    python benchmarks/oktopk_delay.py --output docs/results/oktopk/oktopk_delay.json

The gradients of ranks in the simulated world are a signal that they share, the same in every step,
and noise of their own:

    g_i = s + z_i         s ~ N(0, 0.3^2), z_i ~ N(0, 1), both for each entry

The table has, after the last step:

    delay       (mean_i e_i) . s / (s . s)      steps of the signal that are held back
    residual    the root of the mean square of all e_i, in units of the noise of one step
    KB          sent by a rank in a step, mean over ranks and steps

Legend: e_i the residual of rank i.  A row that is in the file is not measured again.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from benchmarks import script
from lightning_dsgd.algorithms import make_algorithm
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.lab.simulate.processors import on_one_core
from lightning_dsgd.simulated import SimulatedWorld

STRATEGIES = ["oktopk:rule=paper", "oktopk:rule=shared", "topk_allgather"]
SIGNAL = 0.3


def drive(net: Any, spec: str, settings: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Returns a rank's residual, and the bytes that it has sent."""
    algorithm: Any = make_algorithm(f"{spec}:density={settings['density']}")
    x = torch.zeros(settings["entries"])
    algorithm.start(net, x)
    signal, noise = signal_of(settings), torch.Generator().manual_seed(1 + net.rank)
    for _ in range(settings["steps"]):
        algorithm.before_update(x, signal + torch.randn(len(x), generator=noise))
    return algorithm.residual, net.counters.bytes_sent


def signal_of(settings: dict[str, Any]) -> torch.Tensor:
    return SIGNAL * torch.randn(settings["entries"], generator=torch.Generator().manual_seed(0))


def measure(spec: str, num_ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    residuals, sent = zip(*SimulatedWorld(num_ranks).run(drive, spec, settings), strict=True)
    of_all, signal = torch.stack(residuals), signal_of(settings)
    return {
        "strategy": spec,
        "ranks": num_ranks,
        "delay": float(of_all.mean(0) @ signal / (signal @ signal)),
        "residual": float(of_all.square().mean().sqrt()),
        "kb": sum(sent) / num_ranks / settings["steps"] / 1e3,
    }


def main() -> None:
    parser = script.parser(__doc__, "docs/results/oktopk/oktopk_delay.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--entries", type=int, default=4000)
    parser.add_argument("--density", type=float, default=0.01)
    args = parser.parse_args()
    settings = {key: value for key, value in vars(args).items() if key != "output"}
    rows = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    known = {(row["strategy"], row["ranks"]) for row in rows}
    with on_one_core():
        for num_ranks in args.ranks:
            for spec in STRATEGIES:
                if (spec, num_ranks) in known:
                    continue
                rows.append(measure(spec, num_ranks, settings))
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
                write_result(provenance() | {"settings": settings, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
