"""Steps per second of several strategies, in one job, with simulated computation and stragglers.

    lightning-dsgd bench throughput --strategies ddp,wagma,wagma:overlap=true,no_sync --ranks 8 \
        --network 1gbit --compute-ms 400 --delay-ms 320 --delayed-ranks 2 --params 1e6 --steps 30 \
        --output FILE.json

All ranks are started once; then they run one `Trainer.fit` after another, every strategy once a
round, in an order that changes from round to round.  Computation is a sleep, so that many ranks fit
on few cores, and the same random ranks are delayed for every strategy of a round.

steps_per_s   steps / (time until the slowest rank has done its last step)
with_finish   steps / (time until the slowest rank has the final model)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from lightning_dsgd.bench.job import LAUNCHERS, Cell, Job, finish, in_turn
from lightning_dsgd.bench.network import Link, why_not

STATISTICS = ("steps_per_s", "with_finish", "wait_s_per_step", "mb_sent_per_step", "late_share")
LINK_CHECK = "allreduce_bandwidth"
"""The cell that measures the network itself."""
_MOST_CHECKED_PARAMS = 10_000_000
_CHECKED_S = 0.6
"""How long an all-reduce should take that checks the link."""


def run_cell(cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """One fit of one strategy on this rank; or the check of the link."""
    if cell["strategy"] == LINK_CHECK:
        return measure_link(settings)
    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_dsgd.bench import contestants
    from lightning_dsgd.callbacks import StragglerInjector

    steps, ranks = settings["steps"], settings["world_size"]

    class Sleeper(L.LightningModule):
        """So many parameters, and a step that takes so long and computes next to nothing."""

        def __init__(self) -> None:
            super().__init__()
            side = int(settings["params"] ** 0.5)  # a matrix, as PowerSGD compresses only those
            self.weight = nn.Parameter(torch.zeros(side, side))
            self.slope = torch.randn(side, side)  # the gradient, of which some entries are large

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(settings["compute_s"])
            return (self.weight * self.slope).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.begin = self.end = 0.0
            self.before: dict[str, float] = {}
            self.after: dict[str, float] = {}

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            torch.distributed.barrier()
            self.before = communication(trainer)
            self.begin = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.end = time.perf_counter()
            if trainer.global_step == steps:
                self.after = communication(trainer)

    clock = Clock()
    straggler = StragglerInjector(
        settings["delay_s"], settings["delayed_ranks"], seed=cell["round"]
    )
    L.seed_everything(cell["round"], verbose=False)
    trainer = contestants.trainer(
        cell["strategy"], ranks, max_steps=steps, max_epochs=-1, callbacks=[clock, straggler]
    )
    trainer.fit(Sleeper(), DataLoader(TensorDataset(torch.zeros(steps * ranks, 1))))
    result = {"seconds": clock.end - clock.begin, "finished_s": time.perf_counter() - clock.begin}
    if not clock.after:
        return result
    return result | {
        "wait_s_per_step": (clock.after["wait_s"] - clock.before["wait_s"]) / steps,
        "mb_sent_per_step": (clock.after["bytes_sent"] - clock.before["bytes_sent"]) / steps / 1e6,
        **{k: v for k, v in clock.after.items() if k not in clock.before},
    }


def communication(trainer: Any) -> dict[str, float]:
    """What a strategy of ours has sent and waited for; Lightning's own do not say."""
    ours = hasattr(trainer.strategy, "communication")
    return trainer.strategy.communication() if ours else {}


def measure_link(settings: dict[str, Any]) -> dict[str, Any]:
    """What an all-reduce gets through the link: it sends 2n(P-1)/P elements in each direction."""
    import torch
    import torch.distributed as dist

    from lightning_dsgd.transport.process_group import ProcessGroupTransport

    if not dist.is_initialized():
        from lightning_dsgd.bench import contestants

        # Lightning's own opens the process group, whatever the launcher, and nothing besides.
        contestants.trainer("ddp", settings["world_size"]).strategy.setup_environment()
    num_params = _MOST_CHECKED_PARAMS
    if settings["link_bit_s"]:
        num_params = min(num_params, int(_CHECKED_S * settings["link_bit_s"] / 64))
    net, x, times = ProcessGroupTransport(), torch.zeros(num_params), []
    for _ in range(4):
        net.barrier().wait()
        begin = time.perf_counter()
        net.all_reduce(x).wait()
        times.append(time.perf_counter() - begin)
    net.barrier().wait()
    net.close()
    sent_bits = 32 * 2 * num_params * (net.world_size - 1) / net.world_size
    return {"rate_bit_s": sent_bits / statistics.median(times[1:])}


def flatten(result: Cell, steps: int) -> dict[str, Any]:
    """One line a cell: figures of the slowest rank, or the mean over the ranks."""
    ranks = result["ranks"]
    flat: dict[str, Any] = {
        "strategy": result["strategy"],
        "round": result["round"],
        "steps_per_s": steps / max(rank["seconds"] for rank in ranks),
        "with_finish": steps / max(rank["finished_s"] for rank in ranks),
        "seconds": [rank["seconds"] for rank in ranks],
    }
    for name in ranks[0]:
        if name not in ("seconds", "finished_s"):
            flat[name] = statistics.mean(rank[name] for rank in ranks)
    return flat


def summarize(cells: list[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Per strategy the medians over the rounds, and the median of the ratios within each round."""
    by_round: dict[int, dict[str, float]] = {}
    for cell in cells:
        by_round.setdefault(cell["round"], {})[cell["strategy"]] = cell["steps_per_s"]
    rows = []
    for spec in dict.fromkeys(cell["strategy"] for cell in cells):
        mine = [cell for cell in cells if cell["strategy"] == spec]
        row: dict[str, Any] = {"strategy": spec}
        for name in STATISTICS:
            values = [cell[name] for cell in mine if name in cell]
            row[name] = statistics.median(values) if values else None
        for other, key in ((baseline, "ratio"), ("no_sync", "of_no_sync")):
            ratios = [r[spec] / r[other] for r in by_round.values() if spec in r and other in r]
            row[key] = statistics.median(ratios) if ratios else None
            row[f"{key}_range"] = [min(ratios), max(ratios)] if ratios else None
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], baseline: str) -> str:
    """The summary in Markdown."""
    lines = [
        f"| strategy | steps/s | x {baseline} | of no_sync | waited, ms a step | MB sent a step "
        "| late |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [
            f"{row['steps_per_s']:.2f}",
            _or_dash(row["ratio"], "{:.2f}"),
            _or_dash(row["of_no_sync"], "{:.2f}"),
            _or_dash(row["wait_s_per_step"], "{:.0f}", 1e3),
            _or_dash(row["mb_sent_per_step"], "{:.2f}"),
            _or_dash(row["late_share"], "{:.0%}"),
        ]
        lines.append(f"| `{row['strategy']}` | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def _or_dash(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(factor * value)


def chosen_link(network: str | None) -> tuple[Link | None, str]:
    """The link to emulate, and what is to be said of the network."""
    if network is None:
        return None, "loopback (--network emulates a slower one)"
    link = Link.parse(network)
    reason = why_not()
    if reason:
        return None, f"loopback, not {network}: {reason}"
    return link, f"{network} between network namespaces"


def refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends here, in one line, for what each rank would end with a traceback for."""
    from lightning_dsgd.bench import contestants

    try:
        if args.ranks < 1:
            raise ValueError(f"--ranks must be at least 1, got --ranks {args.ranks}; try --ranks 4")
        if not 0 <= args.delayed_ranks <= args.ranks:
            raise ValueError(
                "--delayed-ranks must be at least 0 and at most --ranks, got --delayed-ranks "
                f"{args.delayed_ranks} with --ranks {args.ranks}; try --delayed-ranks 1"
            )
        if args.network is not None:
            Link.parse(args.network)
        for spec in args.strategies.split(","):
            contestants.check(spec, args.ranks)
    except (TypeError, ValueError) as err:
        parser.error(str(err))


def main(argv: list[str] | None = None) -> None:
    """Runs the job and writes the result file."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd bench throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strategies", default="ddp,local_sgd:sync_period=1,wagma,no_sync")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--network", help="of every rank, such as 1gbit or 10gbit,1ms")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="subprocess")
    parser.add_argument("--compute-ms", type=float, default=400.0)
    parser.add_argument("--delay-ms", type=float, default=320.0)
    parser.add_argument("--delayed-ranks", type=int, default=2)
    parser.add_argument("--params", type=float, default=1e6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("throughput.json"))
    args = parser.parse_args(argv)
    refuse(parser, args)
    link, network = chosen_link(args.network)
    print(f"{args.ranks} ranks, {network}")
    specs = args.strategies.split(",")
    job = Job(
        "lightning_dsgd.bench.throughput:run_cell",
        {
            "world_size": args.ranks,
            "steps": args.steps,
            "params": int(args.params),
            "compute_s": args.compute_ms / 1e3,
            "delay_s": args.delay_ms / 1e3,
            "delayed_ranks": args.delayed_ranks,
            "link_bit_s": link.rate_bit_s if link else None,
        },
        args.ranks,
        link,
        args.launcher,
    )
    plan: list[Cell] = [{"strategy": LINK_CHECK, "round": 0}] if args.ranks > 1 else []
    plan += in_turn(specs, "round", args.rounds)
    results = job.run(plan, args.output)
    given = sys.argv[1:] if argv is None else argv
    report = job.provenance(" ".join(["lightning-dsgd bench throughput", *given]))
    report["network"] = network
    if args.ranks > 1:
        report["link_check"] = check_link(results.pop(0), link)
    cells = [flatten(result, args.steps) for result in results]
    report["summary"] = summarize(cells, specs[0])
    report["cells"] = cells
    print("\n" + table(report["summary"], specs[0]))
    finish(report, args.output)


def check_link(result: Cell, link: Link | None) -> dict[str, Any]:
    """The all-reduce rate of the slowest rank, and its share of the link's."""
    rate = min(rank["rate_bit_s"] for rank in result["ranks"])
    share = rate / link.rate_bit_s if link else None
    asked = f", {share:.2f} of the link's" if share else ""
    print(f"an all-reduce alone moves {rate / 1e9:.3f} Gbit/s in each direction{asked}")
    return {"rate_bit_s": rate, "share_of_link": share}


if __name__ == "__main__":
    main()
