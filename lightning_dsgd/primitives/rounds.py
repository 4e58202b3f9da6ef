"""What runs beside the training thread, and answers it: a lane, and rounds that it makes.

    training thread   ask(words) .................................. wait() -> the lane's answer
    lane                   make(net, words), with the other ranks' lanes -> the answer

`Background` is a lane with a way back to the training thread.  `Rounds` has such a lane make one
round after the other, each when the training thread asks for it.

What the training thread tells the lane is there at once, or once the device has done what the
thread had queued (`Lane.tell`).  The tensors that a round works in belong to the lane from `ask` to
the end of `wait`, and else to the training thread.

Why nobody waits for ever: a training thread waits only for its own lane.  A lane in a round waits
for the other ranks' lanes, which begin the round once their training threads have asked for it; an
algorithm has each rank ask as often as any other, also where the rank stands still (`settle`).  A
lane that fails makes its rank a lost one, and the loss of any rank ends every wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_dsgd.transport import Receipt, Transport

_WORDS: Final = torch.empty(0, dtype=torch.int64)


class Background:
    """Runs a function in a lane that the training thread tells, and that answers it.

    Attributes:
        home: a network beside the lane's, of the training threads; the lane answers on it

    Args:
        net: the network, of which the lane gets channels of its own
        serve: runs in the lane, with these channels, until the lane is stopped
        name: the lane's name
    """

    def __init__(self, net: Transport, serve: Callable[[Transport], None], name: str) -> None:
        self.home = net.sub("home")
        self._me = net.rank
        self._lane = net.spawn_lane(serve, name)

    # ---- the training thread ----

    def tell(self, words: Sequence[int], tag: int = 0) -> None:
        """Tells the lane some integers."""
        self._lane.tell(torch.tensor(words), tag)

    def expect(self) -> Receipt:
        """Returns the receipt of the lane's next answer."""
        return self.home.recv(_WORDS, self._me)

    def check(self) -> None:
        """Raises the lane's failure, if it has failed."""
        self._lane.check()

    def stop(self) -> None:
        """Ends the lane; never waits for another rank."""
        self._lane.stop()

    # ---- the lane ----

    def answer(self, words: Tensor = _WORDS) -> None:
        """Answers the training thread."""
        self.home.send(words, self._me)


class Rounds:
    """Makes rounds in a lane, one after the other, each when the training thread asks for it.

    Args:
        net: the network, of which the lane gets channels of its own
        make: makes a round in the lane, with these channels and what the training thread has told;
            returns the answer
        name: the lane's name
    """

    def __init__(
        self, net: Transport, make: Callable[[Transport, Tensor], Tensor], name: str
    ) -> None:
        self._make = make
        self._me = net.rank
        self._answers: deque[Receipt] = deque()  # of the rounds under way, the oldest first
        self._background = Background(net, self._serve, name)

    # ---- the training thread ----

    @property
    def num_under_way(self) -> int:
        """How many rounds this rank has asked for, and has not waited for."""
        return len(self._answers)

    def ask(self, words: Sequence[int]) -> None:
        """Asks for a round; the round begins once those asked for before have been made."""
        self._answers.append(self._background.expect())
        self.add(words)

    def add(self, words: Sequence[int]) -> None:
        """Tells the lane more of the round that was asked for last: see `hear`."""
        self._background.tell(words)

    def is_made(self) -> bool:
        """Returns whether the oldest round under way has been made."""
        return self._answers[0].done()

    def wait(self) -> list[int]:
        """Waits for the oldest round under way, and returns the answer."""
        answer: list[int] = self._answers.popleft().wait().tolist()
        return answer

    def check(self) -> None:
        """Raises the lane's failure, if it has failed."""
        self._background.check()

    def stop(self) -> None:
        """Ends the lane; never waits for another rank."""
        self._background.stop()

    # ---- the lane ----

    def hear(self, net: Transport) -> Tensor:
        """Waits in the lane for what the training thread tells next."""
        return net.recv(_WORDS, self._me).wait(math.inf)

    def _serve(self, net: Transport) -> None:
        while True:
            # The thread that makes `_background` has it before it asks for anything.
            answer = self._make(net, self.hear(net))
            self._background.answer(answer)
