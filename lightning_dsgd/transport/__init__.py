"""The network: what an algorithm may ask of it, and the transports that give it.

    contract          what every transport promises
    endpoint          what all transports share; `collectives`, written once; `works`
    messages          what marks a message, and its form as bytes
    view              a network of some of the ranks, over any of these
    processes         real ranks: a transport that is given a wire; its `lanes`
    mailboxes         where messages and receives meet
    staging           tensors on a device on their way, and messages that have no room yet
    wire              what carries messages between processes: TCP, or that of the wing `mpi`
    mesh              who is alive, over `connections`, each a `connection` after its `handshake`
    memory            what messages may take of it: what may lie unasked, and pinned chunks
    process_group     real ranks over TCP, with torch's own collectives for CUDA tensors
    native            those collectives; `native_groups`, `native_sends`; `tickets`: their one order
    mpi_job           whether mpiexec or srun has started the ranks
    rendezvous        how real ranks meet, before there is a transport
    counters          what a rank has sent, how long it has waited, and who is told of that

Whoever uses a transport imports the names below, which are the contract's.
"""

from lightning_dsgd.transport.contract import (
    ANY,
    Deadlock,
    Diverged,
    Lane,
    LaneStopped,
    PeerLost,
    Receipt,
    Timeout,
    Transport,
    TransportError,
    Work,
    failed,
)
from lightning_dsgd.transport.counters import Counters

__all__ = [
    "ANY",
    "Counters",
    "Deadlock",
    "Diverged",
    "Lane",
    "LaneStopped",
    "PeerLost",
    "Receipt",
    "Timeout",
    "Transport",
    "TransportError",
    "Work",
    "failed",
]
