"""Who computes which micro-batch of a step: the protocol of `balanced`, without threads and clocks.

A step is a number of units, fixed beforehand: the micro-batches that DDP's ranks would compute in
it.  The rank that would is a unit's home.  Each unit enters the step's sum exactly once, and it
does not matter which rank has computed it.  Ranks compute as many as they have time for:

    rank     has nothing in hand; tells what it has finished, if anything        READY    to dealer
    dealer   grants a unit that is free, the rank's own first                    GRANT
             or says that it has none at the moment                              LATER
    rank     begins what was granted, and so asks for the one after it           BEGIN    to dealer
    dealer   grants that one while the rank computes
    dealer   has heard that all units of the step are finished                   CLOSED   to all
    lanes    sum what each rank has finished; no training thread is needed for it

**Grants look at speeds.**  The dealer grants no unit to a rank that would finish it after the other
ranks could have finished all that is free.  A rank's time is the median of its last units' times;
before it has finished one, the median of the other ranks' times.

**Backups.**  Where nothing is free, a rank that has nothing in hand may take over a unit of
another, if it is expected to finish first:

    dealer   asks the rank that has the unit                                     CONTEST
    lane     gives the unit back, if that rank has not begun it                  ANSWER dropped
             or says that it is begun, and from now on that rank must ask        ANSWER begun
             before the unit enters its sum; or that it has entered              ANSWER finished
    dealer   grants the unit, or grants it a second time
    rank     has computed a unit that two ranks compute                          COMMIT   to dealer
    dealer   says yes to the first of the two, no to the other                   VERDICT
    rank     with a no drops that gradient

A rank whose unit nobody contests asks nobody.

**Each unit enters the sum once.**  A unit is free, or one rank has it, or two contest it.  The
dealer takes it from the free ones when it grants it.  A rank puts a unit into its sum if it alone
has it, or if the dealer has said yes; the dealer says yes once.  Whether it alone has it is settled
by the lane of the rank that began it, under one lock with the sum: a unit is contested before it
has entered, or not at all.  CLOSED is sent when all have entered, so no lane sums too early; and a
rank that is told CLOSED while it computes a unit drops that one, for another rank's has entered.

**A rank without a unit** in a step makes the step's sum and the optimizer's step like all others.

**A rank that is behind.**  CLOSED waits for no rank that has no unit in hand.  So others may be
some steps ahead of a rank that stalls: its lane adds to their sums what it has, nothing, and keeps
the sums for it.  It applies them one after the other.  No step closes while a rank is more than
`MAX_LAG` steps behind it, so it never keeps more sums than that.

**Nobody waits for ever.**  Lanes answer at once, so a message waits for no training thread.  The
dealer answers each READY, with a GRANT or with LATER.  A rank waits for more than that answer in
two cases.  It waits for a VERDICT, which the dealer gives at once.  And where it has nothing more
to do in a step it waits for a GRANT or for CLOSED.  While a unit is not finished, it is free or a
rank has it.  If it is free, some rank is expected to finish it first: that rank is granted it when
it asks; if it does not come in the time that was expected, the dealer looks again, and then expects
another to.  If a rank has it, that rank goes on and finishes, and waits for nobody meanwhile.  If
two have it, one of them finishes.  So all units finish, unless a rank is lost, which ends all
waits.  A rank that is `MAX_LAG` steps behind is not waiting, or it would not be behind.

**Where a rank is lost** (`on_loss="continue"`), or the dealer is, all others conclude from what
each of them has which units are free again, and the first of them deals on: see `losses`.

Steps that are left in the midst, where an epoch is stopped early, are left by all ranks: the first
message about a later step ends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

NONE: Final = -1
"""Stands for a unit where there is none."""
DEALER: Final = 0
"""The rank that deals."""
MAX_LAG: Final = 4
"""How many steps a rank may be behind the step that closes."""

READY, BEGIN, COMMIT, ANSWER, GRANT, LATER, CONTEST, VERDICT, CLOSED = range(9)
DROPPED, BEGUN, FINISHED = range(3)

Words = tuple[int, ...]
"""A message: its kind, its step, and what it is about."""


class Conclusion(NamedTuple):
    """Where ranks go on after a loss, as `losses` concludes.

    Attributes:
        summed: the last step that is summed
        step: the step that is dealt next
        done: the units of it that have entered
        held: the units of it that ranks compute, by rank
        steps: the step that each rank is in
    """

    summed: int = NONE
    step: int = NONE
    done: set[int] = set()  # noqa: RUF012, nobody changes it
    held: dict[int, int] = {}  # noqa: RUF012
    steps: Sequence[int] = ()
