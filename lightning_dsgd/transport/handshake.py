"""Who may connect: each end of a connection proves that it is a rank of this job.

The ranks share a secret, which rank 0 draws and the process group carries.  After that it travels
no more: each end proves that it knows the secret, for numbers drawn anew for every connection:

    listener    a random number
    connector   its rank, a random number, HMAC-SHA256(secret, listener's number | both ranks)
    listener    HMAC-SHA256(secret, connector's number | both ranks)

A stranger that has proved nothing after `HELLO_WITHIN_S` is turned away.  Where there are more
strangers than ranks and `MOST_STRANGERS`, the one that has waited longest is turned away.  A rank
that is turned away tries again.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Final

NONCE_BYTES: Final = 16
HELLO: Final = struct.Struct(f"<I{NONCE_BYTES}s32s")  # a rank, its random number, its proof
PROOF_BYTES: Final = 32
HELLO_WITHIN_S: Final = 5.0
MOST_STRANGERS: Final = 64
"""How many connections, beyond one a rank, may be open whose other end nobody knows yet."""


class Secret:
    """What the ranks of this job share, and what they do with it.

    Args:
        secret: the bytes that all ranks know
        rank: this process's rank
        world_size: how many ranks there are at the start
    """

    def __init__(self, secret: bytes, rank: int, world_size: int) -> None:
        self._secret, self.rank, self._world_size = secret, rank, world_size
        self.knows_newcomers = False
        """Whether there may be ranks that were not there at the start."""

    def proof(self, nonce: bytes, rank: int, to: int) -> bytes:
        """Returns what only the ranks of this job can answer to a random number."""
        return hmac.digest(self._secret, nonce + struct.pack("<II", rank, to), "sha256")

    def is_proof(self, proof: bytes, nonce: bytes, rank: int, to: int) -> bool:
        """Returns whether `proof` is the answer of a rank of this job."""
        expected = self.proof(nonce, rank, to)
        is_rank = rank < self._world_size or self.knows_newcomers
        return is_rank and hmac.compare_digest(proof, expected)

    def introduce(self, sock: socket.socket, rank: int) -> None:
        """Proves to a listener that this is a rank, and has the listener prove that it is `rank`.

        Runs in the thread that connects, which waits for the answers.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = self.proof(_receive(sock, NONCE_BYTES), self.rank, rank)
        sock.sendall(HELLO.pack(self.rank, nonce, proof))
        if not self.is_proof(_receive(sock, PROOF_BYTES), nonce, rank, self.rank):
            raise PermissionError(f"whoever listens there is not rank {rank} of this job")


class Stranger:
    """A connection whose other end nobody knows yet; only the mesh's thread touches it.

    Args:
        sock: a socket that does not block
        secret: the secret of this job
    """

    def __init__(self, sock: socket.socket, secret: Secret) -> None:
        self.sock = sock
        self.until = time.monotonic() + HELLO_WITHIN_S
        """By then the stranger must have proved which rank it is."""
        self.rank: int | None = None
        """The rank that the stranger has proved to be."""
        self._secret = secret
        self._said = b""
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        sock.send(self._nonce)  # fits into a new connection

    def read(self) -> bool:
        """Reads what has come; returns False if the stranger is to be turned away."""
        try:
            piece = self.sock.recv(HELLO.size - len(self._said))
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self._said += piece
        return bool(piece) and (len(self._said) < HELLO.size or self._recognize())

    def _recognize(self) -> bool:
        """Returns whether the peer is the rank that it says; if so, proves to it who this is."""
        rank, nonce, proof = HELLO.unpack(self._said)
        me = self._secret.rank
        if not self._secret.is_proof(proof, self._nonce, rank, me):
            return False
        try:
            self.sock.send(self._secret.proof(nonce, me, rank))
        except OSError:
            return False
        self.rank = rank
        return True


def _receive(sock: socket.socket, count: int) -> bytes:
    """Receives so many bytes and no more, for what follows is the mesh's."""
    received = b""
    while len(received) < count:
        piece = sock.recv(count - len(received))
        if not piece:
            raise ConnectionResetError("it turned this rank away")
        received += piece
    return received
