"""The papers' machines, and what trains on them: the figures that a simulation starts from.

Each figure says where it comes from: *stated* in the paper, *derived* from what the paper states,
or *assumed*, where it states nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Final

from lightning_dsgd.lab.simulate.machines import Machine, Spread


def _sigma(typical: float, extreme: float, num_draws: int) -> float:
    """Returns sigma of a log-normal distribution with this median, and with this largest draw."""
    return math.log(extreme / typical) / NormalDist().inv_cdf(1 - 1 / num_draws)


# WAGMA-SGD (https://arxiv.org/abs/2005.00124), section 5: Cray XC50, one P100 per node, Aries.
# - latency: 1.3 us, the figure of Cray's white paper on Aries (Alverson et al., WP-Aries01-1112).
# - compute, derived: on 64 nodes without delays AD-PSGD, which waits for nothing, makes 1.61 steps
#   per second with 128 images per rank (section 5.2).
# - bandwidth, derived from the same sentence: local SGD with one all-reduce per step makes 1.52, so
#   2 (63/64) of 102 MB take 1/1.52 - 1/1.61 s, at 5.4 GB/s.
# - delays, stated: 320 ms, two random ranks per step.
_PIZ_DAINT = Machine(
    latency_s=1.3e-6,
    bandwidth_bytes_s=2 * 63 / 64 * 4 * 25_559_081 / (1 / 1.52 - 1 / 1.61),
    compute_s=1 / 1.61,
    num_params=25_559_081,
    delay_s=0.32,
    delayed_ranks=2,
    # A P100 took 2.56 s for 100 times torch.topk of 2M elements (torch 1.1,
    # https://github.com/pytorch/pytorch/issues/22812): 12.8 ns per element.
    exact_topk_s=2.5576 / 100 / 2e6,
    # Assumed: reads and writes 24 bytes per element at three quarters of a P100's 732 GB/s.
    threshold_s=24 / (0.75 * 732e9),
)

# The same paper, section 5.3: Transformer with 61,362,176 parameters, stated.  Its figure 6 has the
# step times without figures in the text.  Assumed: median 0.45 s, log-normal with sigma 0.3.
_TRANSFORMER = replace(
    _PIZ_DAINT,
    num_params=61_362_176,
    spread=Spread(least_s=0.0, median_s=0.45, sigma=0.3),
    delay_s=0.0,
    delayed_ranks=0,
)

# The same paper, section 5.4: ResNet-LSTM with 8,476,421 parameters.  Stated: 5,000 iterations took
# from 1.7 to 43.5 s, the median was below 2 s.  Assumed: the median is 1.9 s, and what is above
# 1.7 s is log-normal; sigma follows from the largest of 5,000.
_HABITAT = replace(
    _TRANSFORMER,
    num_params=8_476_421,
    spread=Spread(1.7, 1.9, _sigma(1.9 - 1.7, 43.5 - 1.7, 5000), most_s=43.5),
)

# Ok-Topk (https://arxiv.org/abs/2201.07598), section 5: the same machine under mpi4py.
# - BERT, 133,547,324 parameters, stated.  400,000 steps on 32 nodes took Ok-Topk 47 hours, 0.423 s
#   per step (section 5.4.3).  Derived: 0.36 s of it is computation, the rest what our messages and
#   the selection cost.
# - bandwidth, derived: dense all-reduces, overlapped with a backward pass of two thirds of the
#   step, took 150 hours, 1.35 s per step.  So 2 (31/32) of 534 MB take 1.35 - 0.36 / 3 s.
_BERT = replace(
    _PIZ_DAINT,
    num_params=133_547_324,
    compute_s=0.36,
    bandwidth_bytes_s=2 * 31 / 32 * 4 * 133_547_324 / (1.35 - 0.36 / 3),
    delay_s=0.0,
    delayed_ranks=0,
)
# VGG-16 with 14,728,266 parameters, 16 images of Cifar-10 per rank.  Assumed: 30 ms with I/O.
_VGG = replace(_BERT, num_params=14_728_266, compute_s=0.03)
# LSTM with 27,569,568 parameters.  Derived from "1.39x faster than DenseOvlp" on 32 nodes (section
# 5.4.2): c / 3 + t_dense = 1.39 (c + t_Ok-Topk), with t_dense = 0.26 s and t_Ok-Topk = 0.02 s.
_LSTM = replace(_BERT, num_params=27_569_568, compute_s=0.22)

# SGP (https://arxiv.org/abs/1811.10792), section 5: DGX-1 servers with 8 V100, one server per rank,
# ResNet-50.  Compute: 4.384 mini-batches of 256 images per second (section 5.1).  Links, stated.
# Assumed: a latency of 50 us over TCP, 2 us over InfiniBand.
_ETHERNET = Machine(
    latency_s=50e-6, bandwidth_bytes_s=10e9 / 8, compute_s=1 / 4.384, num_params=25_557_032
)
_INFINIBAND = replace(_ETHERNET, latency_s=2e-6, bandwidth_bytes_s=100e9 / 8)

# HPSGD (https://arxiv.org/abs/2009.02701), section 4: 4 V100, ResNet-101 (42.5M parameters) on
# Cifar-10.  The workers are processes, so 16 of them share the 4 GPUs (stated), and the memory that
# they communicate through (one link).
# Assumed: 0.15 s for 128 images.  Derived: with four workers HPSGD is 133% faster than an
# all-reduce in every step, so 2 (3/4) of 170 MB per worker take 1.33 times as long as a step.
_STATION = Machine(
    latency_s=20e-6,
    bandwidth_bytes_s=4 * 2 * 3 / 4 * 4 * 42.5e6 / (1.33 * 0.15),
    compute_s=0.15,
    num_params=42_500_000,
    shared_link=True,
    devices=4,
)

# Ranks in network namespaces behind shaped links, a sleep as computation, two stragglers: the
# defaults of `python -m benchmarks throughput`, which takes them from here.  Selection as in one
# run of benchmarks/sparse_selection.py on 2 threads (25M elements: top-k 514.68 ms, accumulating
# and marking 29.52 ms).
EMULATED = Machine(
    latency_s=1e-4,
    bandwidth_bytes_s=1e9 / 8,
    compute_s=0.4,
    num_params=1_000_000,
    delay_s=0.32,
    delayed_ranks=2,
    exact_topk_s=0.51468 / 25e6,
    threshold_s=0.02952 / 25e6,
)

MACHINES: Final = {
    "piz-daint": _PIZ_DAINT,
    "piz-daint-transformer": _TRANSFORMER,
    "piz-daint-habitat": _HABITAT,
    "piz-daint-vgg": _VGG,
    "piz-daint-lstm": _LSTM,
    "piz-daint-bert": _BERT,
    "dgx-ethernet": _ETHERNET,
    "dgx-infiniband": _INFINIBAND,
    "dgx-station": _STATION,
    "emulated-1gbit": EMULATED,
    "emulated-10gbit": replace(EMULATED, bandwidth_bytes_s=10e9 / 8),
}
"""All machines, by name."""
