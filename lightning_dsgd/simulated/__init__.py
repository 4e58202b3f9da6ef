"""P ranks in one process on a virtual clock: every run is equal to the bit, and no wait is real.

    world = SimulatedWorld(world_size=8, latency_s=1e-5, bandwidth_bytes_s=1e9)
    results = world.run(fn, *args)        # fn(net, *args) on every rank

Ranks and lanes are threads with a clock each, of which one runs, the holder of the baton.  Whoever
computes, waits or polls passes the baton to the thread with the smallest clock, so that virtual
time never runs backwards and nothing depends on the machine.  A thread that waits for another by
other means than the transport (a lock, an event) keeps the baton, and the world stands still.

    world         what a caller sees: ranks, links, faults to come
    endpoint      a rank's transport, its receives and lanes
    simulation    one run: its threads' beginning and end, and what became of each
    links         messages: what they cost, and which receive takes which; what communication takes
                  of the processors: here nothing (see `lab.simulate.processors`)
    faults        who is lost, and by what; who goes on after that is a matter of a wing
    baton         which thread runs next
"""

from lightning_dsgd.simulated.baton import Killed
from lightning_dsgd.simulated.endpoint import POLL_S, SimulatedTransport
from lightning_dsgd.simulated.world import RankFailed, SimulatedWorld

__all__ = [
    "POLL_S", "Killed", "RankFailed", "SimulatedTransport", "SimulatedWorld",
]  # fmt: skip
