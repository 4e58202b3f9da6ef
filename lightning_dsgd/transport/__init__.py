"""The network: what an algorithm may ask of it, and the transports that give it.

    contract          what every transport promises
    endpoint          what all transports share; `collectives`, written once; `messages`, `works`
    view              a network of some of the ranks, over any of these
    processes         real ranks: a transport that is given a wire; its `lanes`
    mailboxes         where messages and receives meet; `flow`: what may lie there unasked
    staging           tensors on a device on their way, and messages that have no room yet
    wire              what carries messages between processes: `tcp`, or that of the wing `mpi`
    mesh              who is alive, over `connections`, each a `connection` after its `handshake`
    frames            a message as bytes
    memory            what messages may take of it; `pinned`: chunks by which they come to a device
    switching         how soon threads hand over the interpreter
    process_group     real ranks over TCP, with torch's own collectives for CUDA tensors
    native            those collectives; `tickets`: the one order that they need; `pairs`, `parts`
    mpi_job           whether mpiexec or srun has started the ranks
    rendezvous        how real ranks meet, before there is a transport
    counters          what a rank has sent, and how long it has waited
    watch             what the network tells who records a training's waits

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
