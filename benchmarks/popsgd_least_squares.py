"""PopSGD on synthetic least squares: does the variance fall as 1/n?  (The paper's section 6 and 8.)

    f(x) = (1/2m) |A x - b|^2,   A of m x d normal,  b = A 1 + normal noise,  one sample a gradient

n ranks in the simulated world run the package's own PopSGD at a constant learning rate from x = 0.
Parallel time is the number of steps of each rank.  Once the error no longer falls, its mean over
time is the variance: of the mean of the models, and of one fixed model, as the paper tracks it.

    python benchmarks/popsgd_least_squares.py [--max-ranks 256] [--steps 1500]

prints the variances and, from a straight line through their logarithms, the slopes with 95%
confidence intervals (t distribution); writes --output and a plot beside it.  The
baseline is mini-batch SGD with batch n.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor

from lightning_dsgd.algorithms.popsgd import PopSGD
from lightning_dsgd.lab.results import provenance, write_result
from lightning_dsgd.simulated import SimulatedWorld
from lightning_dsgd.tasks.regression import least_squares

M, D = 4096, 8
T_97_5 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """A, b and the minimum."""
    a, b = least_squares(M, D)
    return a, b, torch.linalg.lstsq(a, b[:, None]).solution[:, 0]


A, B, BEST = problem()


def descend(
    net: Any, num_steps: int, lr: float, seed: int, a: float = math.inf, **options: bool
) -> Tensor:
    """One rank's models after every step; the rate is b / (a + its phase clock), b = lr a."""
    algorithm = PopSGD(seed=seed, **options or {"blocking": True})  # type: ignore[arg-type]
    x = torch.zeros(D, dtype=torch.float64)
    algorithm.start(net, x)
    generator = torch.Generator().manual_seed(seed * 100_003 + net.rank)
    samples = torch.randint(M, (num_steps,), generator=generator)
    rows, b = A[samples], B[samples]
    xs = torch.empty(num_steps, D, dtype=torch.float64)
    for k in range(num_steps):
        net.compute(1.0)
        algorithm.before_update(x, x[:0])
        rate = lr / (1 + algorithm.clock / a)
        x.sub_(rows[k], alpha=rate * float(rows[k] @ x - b[k]))
        algorithm.after_update(x)
        xs[k] = x
    algorithm.settle(x)
    algorithm.finish(x)
    return xs


def mini_batch(batch: int, num_steps: int, lr: float, seed: int) -> Tensor:
    """Squared errors of sequential SGD after every step."""
    generator = torch.Generator().manual_seed(seed + 77)
    x = torch.zeros(D, dtype=torch.float64)
    errors = torch.empty(num_steps, dtype=torch.float64)
    for k in range(num_steps):
        samples = torch.randint(M, (batch,), generator=generator)
        a = A[samples]
        x = x - lr / batch * (a.T @ (a @ x - B[samples]))
        errors[k] = ((x - BEST) ** 2).sum()
    return errors


def slope(sizes: list[int], values: list[float]) -> tuple[float, float]:
    """Of log(value) over log(n), and half of its 95% confidence interval."""
    x = torch.tensor([math.log(n) for n in sizes], dtype=torch.float64)
    y = torch.tensor([math.log(v) for v in values], dtype=torch.float64)
    dx = x - x.mean()
    beta = float((dx * y).sum() / (dx**2).sum())
    residuals = y - y.mean() - beta * dx
    free = len(sizes) - 2
    deviation = math.sqrt(float((residuals**2).sum()) / free / float((dx**2).sum()))
    return beta, T_97_5[free] * deviation


def draw(curves: dict[str, Any], sizes: list[int], table: dict[str, list[float]], to: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.2))
    for n in sizes:
        left.semilogy(curves["one model"][n], lw=0.7, label=f"n = {n}")
    left.set(title="PopSGD: one fixed model", xlabel="steps of each rank", ylabel="|x - x*|²")
    left.legend(fontsize=7, ncol=2)
    n = sizes[-1]
    middle.semilogy(curves["one model"][n], lw=0.7, label=f"PopSGD, n = {n}: one model")
    middle.semilogy(curves["mean"][n], lw=0.7, label=f"PopSGD, n = {n}: mean of the models")
    middle.semilogy(curves["mini-batch"][n], lw=0.7, label=f"SGD, batch {n}")
    middle.semilogy(curves["one model"][1], lw=0.7, label="SGD, batch 1")
    middle.set(title="against mini-batch SGD", xlabel="steps")
    middle.legend(fontsize=7)
    for name, values in table.items():
        right.loglog(sizes, values, "o-", label=name)
    right.loglog(sizes, [table["mean"][0] / n for n in sizes], "k:", label="1/n")
    right.set(title="variance once it no longer falls", xlabel="n")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(to, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    output = Path("docs/results/popsgd/popsgd_least_squares.json")
    parser.add_argument("--output", type=Path, default=output)
    options = parser.parse_args()
    sizes = [1 << e for e in range(options.max_ranks.bit_length())]
    steps, lr, seed = options.steps, options.lr, options.seed
    curves: dict[str, dict[int, list[float]]] = {"one model": {}, "mean": {}, "mini-batch": {}}
    for n in sizes:
        xs = torch.stack(SimulatedWorld(n).run(descend, steps, lr, seed))
        curves["one model"][n] = ((xs[0] - BEST) ** 2).sum(1).tolist()
        curves["mean"][n] = ((xs.mean(0) - BEST) ** 2).sum(1).tolist()
        curves["mini-batch"][n] = mini_batch(n, steps, lr, seed).tolist()
    settled = steps - steps // 2
    table = {
        name: [sum(curve[n][-settled:]) / settled for n in sizes] for name, curve in curves.items()
    }
    print("n " + "".join(f"{name:>14}" for name in table))
    for i, n in enumerate(sizes):
        print(f"{n:<4}" + "".join(f"{values[i]:>14.3e}" for values in table.values()))
    slopes = {name: slope(sizes, values) for name, values in table.items()}
    for name, (beta, half) in slopes.items():
        print(f"slope of log(variance) over log(n), {name}: {beta:.3f} +- {half:.3f}")
    result = {"steps": steps, "lr": lr, "seed": seed, "n": sizes, "variance": table}
    result |= {"slope and half of its 95% interval": slopes}
    write_result(provenance() | result, options.output)
    draw(curves, sizes, table, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
