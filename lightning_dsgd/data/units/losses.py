"""What becomes of a step of `balanced` where a rank is lost: a machine without threads and clocks.

The members of the next view (see `elastic.membership`) have stopped their lanes, and come here with
their training threads:

    each member     tells all others which sums it has, and what it has of its step    REPORT
    all members     conclude the same from all reports: see `conclude`
    each member     takes the flags of a sum that it has made without them
    first member    deals what is neither done nor in hand

**What was summed stays.**  Lanes sum the gradients of a step, and after that its flags.  So a rank
that has the flags of a step knows that the lane of each rank has summed that step's gradients.  If
a member has the flags, each member has that sum, or lacks the flags alone: it gets these, and the
step is over.  A member that is some steps behind has the sums that it has missed.

**What was not summed begins anew, but for what members have finished.**  The step that comes after
is open, whether it had been closed or not.  A member's G_r is as it was, as lanes sum a copy: the
units that have entered it are done.  A unit that a member computes goes on.  All other units are
free: those that nobody had begun, and all that the lost rank had, finished or not, as its G_r is
lost with it.  So a lost rank costs what it had finished in one step, and no member's work.

**The sum stays that of the whole step.**  Its units, and by how much each counts, are those of the
epoch's beginning.  A lost rank's samples are drawn by a member in the epochs to come: see
`members_of`.

**Each unit enters the sum once.**  Within a view it has entered one rank's G_r at most: see
`protocol`.  It is done if that rank is a member, and free if not.  It may be in the hand of a
member that had not entered it, or was about to: that one asks the new dealer before it enters it,
as every member does with a unit that it had begun before.  The dealer says no if the unit is done,
or if it has said yes to another.  Messages of the old view are dropped, so no member hears a yes of
the old dealer here; a member that has heard it before has entered the unit, or asks again.

**Who deals, if the dealer is lost.**  The first member always deals, and knows nothing of the old
dealer's: the reports say all that counts.  What a rank had been granted and has not begun is free.

**Nobody waits for ever.**  A loss ends all waits of all ranks; who computes meets the loss where it
waits next.  Nobody waits for another from there to the exchange of reports.  Another loss within
that ends it, and the members of the view after that begin here again: a report is made from what
stands in the replica and the hand, and nothing of it is changed before all reports are there; what
is changed then, from the same reports, is a conclusion that the next one includes.  After it each
member asks the new dealer, as at the beginning of a step, which sees to the rest (`protocol`).

**A newcomer** comes where all members are before the same batch, so all are in the same step, and
none is behind.  It has made no sum and no unit.  It gets the weights of another member and the
batches of the epoch, and asks the dealer for units of this step as all do.

**A lost rank may have applied a sum** that no member has, as it was lost just then.  The members
then sum that step again, and compute what the lost rank had finished of it.  It is the same sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle
from typing import NamedTuple

import torch

from lightning_dsgd.data.units.hand import Hand
from lightning_dsgd.data.units.protocol import NONE, Conclusion
from lightning_dsgd.transport import Transport


class Report(NamedTuple):
    """What a member tells all others.

    Attributes:
        made: the last step whose sum it has, or has had
        step: the step that it is in
        current: the unit that it computes
        entered: the units of that step that are in its G_r
    """

    made: int
    step: int
    current: int
    entered: tuple[int, ...]

    @property
    def is_newcomers(self) -> bool:
        """Whether the member has made no step, and gets the weights that all sums have made."""
        return self.made == self.step == NONE


def report_of(hand: Hand, made: int, *, holds: bool) -> Report:
    """Returns what a member reports.

    Args:
        hand: what it has in hand
        made: the last step whose sum it has, or has had
        holds: whether it has its G_r of the step that it is in, in whole
    """
    return Report(made, hand.step, hand.current, tuple(hand.entered) if holds else ())


def exchange(net: Transport, mine: Report) -> list[Report]:
    """Returns the reports of all members, which call it together."""
    words = torch.tensor([mine.made, mine.step, mine.current, *mine.entered])
    reports = []
    for theirs in net.all_gather(words).wait():
        made, step, current, *entered = theirs.tolist()
        reports.append(Report(made, step, current, tuple(entered)))
    return reports


def conclude(reports: Sequence[Report]) -> Conclusion:
    """Returns what all members conclude from all reports, in the order of the members."""
    summed = max(report.made for report in reports)
    # A step may have been left in its midst, so the open one may be a later one.
    step = max(summed + 1, *(report.step for report in reports))
    there = {rank: report for rank, report in enumerate(reports) if report.step == step}
    return Conclusion(
        summed,
        step,
        {unit for report in there.values() for unit in report.entered},
        {rank: report.current for rank, report in there.items() if report.current != NONE},
        [step if report.is_newcomers else report.step for report in reports],
    )


def members_of(homes: int, members: Sequence[int]) -> list[int]:
    """Returns for each home the place of the member that is it now, or stands for it.

    A home without its rank goes to a newcomer, or else to one member after the other.

    Args:
        homes: how many homes there are: as many as ranks at the start
        members: the numbers of the ranks that are there
    """
    places = {member: place for place, member in enumerate(members)}
    newcomers = [place for member, place in places.items() if member >= homes]
    others = chain(newcomers, cycle(range(len(members))))
    return [places[home] if home in places else next(others) for home in range(homes)]
