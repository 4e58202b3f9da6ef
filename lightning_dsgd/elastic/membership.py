"""Who goes on after a loss: how the ranks agree on the next view.  No I/O, no clock of its own.

A *view* is a number and the ranks in it, its members.  View 0 holds all ranks.  When a member is
lost, wants to leave, or a newcomer wants to join, the members agree on the next view.  A rank has a
number that no other has, not even one that takes its place: who comes again comes as a newcomer.

    lost, join, leave ->  want       to all: leave what you are doing, the view changes
    the proposer          prepare    to the members: a ballot, higher than all that it knows
    a member              promise    takes part in no lower ballot; tells what it has accepted in
                                     one, and whom it believes lost
    the proposer          accept     to the members: these are to be the members of the next view
    a member              accepted   unless it has promised a higher ballot (then: refuse)
    the proposer          commit     more than half of the members have accepted: tells all

This is Paxos (Lamport, 2001, "Paxos Made Simple") for one value, the members of view v + 1, with
the members of view v as its acceptors.  Newcomers have no vote.  A ballot is a round and the rank
that leads it, so no two ranks have the same.

1. **Who proposes.**  The lowest member that a rank does not believe lost, at once; every other one
   in its turn, `patience_s` after the one before it, if nothing has come of it.  A proposer that
   hears of a higher ballot steps back, and gives that ballot time.  Several proposers do no harm.
2. **What is proposed.**  If a promise tells of an accepted proposal, the one of the highest ballot:
   it may have been agreed on.  Else the ranks that have promised and trust each other, and
   newcomers.  The proposer waits for the promises of all whom it does not believe lost,
   `patience_s` at most.  If two of them cannot hear each other, the one goes with whom more cannot;
   of equals, the higher.
3. **Who may go on.**  A proposal needs the promises and then the acceptance of more than half of
   the members, at least as many members must be left, and `min_ranks` in the new view.  A proposer
   that cannot have that ends, and says why.
4. **Who is told.**  A member acts on a view once it is committed.  Every message carries the
   members of the view that it starts from, which is committed; so a member that is behind
   takes that view first, or learns that it is not in it.  A member that is ahead answers with the
   newest view.
5. **Two ranks.**  Half is not more than half: if one of two falls silent, the other ends.  But it
   goes on alone, with min_ranks=1, if the other is known to have *died*: its process has ended, so
   it can take part in nothing any more, and cannot have gone on by itself, as this rank lives.
   Silence, a link that is cut, is never taken for that.  A rank that ends by itself says so.
   In larger views death and silence are the same: two of four that die at once end the job.
6. **Who comes in, and when.**  A newcomer asks all (`join`) until it is a member.  With
   `holds_joins` nothing comes of that at once: it is among those `waiting` until a member admits
   it, at a moment of its choice; from then on the others propose it too.
7. **Groups.**  Where ranks hold a replica of the model together, none of them can go on without the
   others: such a group is in a proposal as a whole, or not at all.  Its ranks vote as all do, also
   on the view without them; so one dead rank of two groups of two leaves three votes of four, and a
   view of two.  Unless min_ranks is given, those that vote count for it, not those that stay.
   Newcomers come in groups too: one that asks counts as `waiting` only once its whole group asks,
   and one that has lost a rank of its group before the view with them ends.  No view has newcomers
   alone: nobody would be left that has the weights.  So a newcomer ends, too, once all others are
   lost that it knows, but for those of its group and those that have asked to join since.

**Why all members of a view agree, and no two views have one number.**  By induction over the
number.  Let all have the same members of view v.  A proposal in ballot b is committed when a
majority has accepted it.  Take the first ballot c > b whose proposal is another one: its promises
came from a majority too, and any two majorities share a member.  That one accepted b before it
promised c (after, it would have refused b), so it told of it, or of a proposal in a ballot between
b and c, all of which are the same as in b.  So c proposes the same.  In a view of two with one
dead, the other is in every majority, and the dead one never was one by itself.  Messages of the
dead may still arrive: nothing above depends on when.

**Why nobody waits for ever.**  Every state has a deadline (`next_at`).  A ballot waits for
`patience_s` for promises and as long for acceptance, and then goes without those who are late, whom
the proposer believes lost from then on: so it is repeated at most P times.  The ballots of several
proposers disturb each other only while their turns overlap.  Whatever happens, a rank that has not
come to a new view after `limit_s` ends, and says so.

**Why nobody goes on alone.**  Between views a rank may do nothing but wait; it comes out of that
into a view that a majority has accepted, or ends.  A rank outside, falsely suspected, either hears
of the view without it, and ends, or hears nothing, believes the others lost, and has no majority.

Legend: P ranks; v the number of a view; b, c ballots.

**Threads.**  None: whoever calls a `Membership` takes care that one thread does so at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from lightning_dsgd.elastic.ballots import (
    ACCEPT,
    ACCEPTED,
    COMMIT,
    GONE,
    JOIN,
    NONE,
    PREPARE,
    PROMISE,
    REFUSE,
    WANT,
    Ballot,
    Beliefs,
    Lead,
    Message,
    Ranks,
    Terms,
    group_of,
    is_majority,
    trusting,
)  # fmt: skip

_LIMIT: Final = 20
"""The time that an agreement on a view may take, as a multiple of `patience_s`."""


class Membership:
    """One rank's end of the agreements: messages and time in, messages and views out.

    Attributes:
        number: the number of the newest view that this rank knows to be committed; -1: none yet
        members: the members of that view
        is_changing: whether the next view is being agreed on
        ended: why this rank is in no view any more; empty as long as it may be
        outbox: what is to be sent: to whom, and the message
        believes: what this rank believes of the others

    Args:
        me: this rank
        members: the members of view 0; none for a newcomer, which has to `ask`
        patience_s: how long to wait for an answer
        min_ranks: how many members a view must have; None: more than half of the last view's
        holds_joins: whether newcomers come in only when they are admitted
        groups: ranks none of which can go on without the others of their group
    """

    def __init__(
        self,
        me: int,
        members: Sequence[int],
        patience_s: float,
        min_ranks: int | None = None,
        *,
        holds_joins: bool = False,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.me = me
        self.members: Ranks = tuple(sorted(members))
        self.number = 0 if self.members else -1
        self.is_changing = not self.members
        self.ended = ""
        self.outbox: list[tuple[int, Message]] = []
        self._patience_s = patience_s
        self._contacts: Ranks = ()
        """The ranks that this newcomer asks to let it in."""
        self._asking: set[int] = set()
        """The ranks that have asked this newcomer to let them in, since it last heard of a loss."""
        self._terms = Terms(min_ranks, tuple(map(tuple, groups)))
        self.believes = Beliefs(me, frozenset(group_of(me, groups)))
        self._holds_joins = holds_joins
        self._ends_at, self._limit_s = math.inf, _LIMIT * patience_s
        self._reset()

    def _reset(self) -> None:
        """Begins a view: nothing has been promised or accepted for the one after it."""
        self._promised = NONE
        self._accepted: tuple[Ballot, Ranks] = (NONE, ())
        self._round = 0
        self._lead: Lead | None = None
        self._act_at = math.inf
        self.believes.told.clear()

    # ---- what happens to this rank ----

    @property
    def next_at(self) -> float:
        """The time at which `tick` is to be called at the latest."""
        if self.ended or not self.is_changing:
            return math.inf
        return min(self._ends_at, self._act_at if self._lead is None else self._lead.deadline)

    def ask(self, now: float, contacts: Sequence[int], within_s: float) -> None:
        """Asks these ranks to let this newcomer in, until it is in a view or `within_s` is over."""
        self._contacts, self._limit_s = tuple(contacts), within_s
        self._act_at, self._ends_at = now, now + within_s
        self._end_if_in_vain()
        self.tick(now)

    def _end_if_in_vain(self) -> None:
        """Ends a newcomer that asks, once nobody is left that could let it in; see rule 7."""
        if not self._contacts or self.number >= 0:
            return
        if {*self._contacts} <= self.believes.lost | self.believes.group | self._asking:
            self._end("could not join, as none of those that it knows is left")
        elif self.believes.missing >= 0:
            self._end(
                f"cannot join without rank {self.believes.missing}, which was to hold shards of "
                "its replica"
            )

    def suspect(self, now: float, rank: int, *, died: bool) -> None:
        """Believes a rank lost, which does not answer; or, if it `died`, will never act again."""
        if self.ended or rank == self.me:
            return
        self.believes.suspect(rank, died=died)
        self._asking.clear()  # a member may have let them in, and was lost then
        self._end_if_in_vain()
        if rank in self.members:
            self._begin(now)
            is_first = self.believes.alive(self.members)[0] == self.me
            if self._lead is None and (self._promised[1] == rank or is_first):
                self._act_at = min(self._act_at, self._turn(now))
            self._go_on(now)

    def waiting(self) -> Ranks:
        """Returns the newcomers whose whole group has asked; any thread may call it."""
        return tuple(sorted(self._terms.whole(self.believes.waiting.copy())))

    def admit(self, now: float, newcomers: Iterable[int]) -> None:
        """Proposes newcomers as members of the next view, but for those that are lost by then."""
        new = {*newcomers} - {*self.members}
        if not self.ended and new:
            self.believes.joins |= new - self.believes.lost
            self._begin(now)
            self._go_on(now)

    def renew(self, now: float) -> None:
        """Wants a next view, whoever is in it."""
        if not self.ended and self.members:
            self._begin(now)
            self._go_on(now)

    def leave(self, now: float) -> None:
        """Wants a next view without this rank."""
        if not self.ended and self.members:
            self.believes.leaves.add(self.me)
            self._begin(now)
            self._go_on(now)

    def tick(self, now: float) -> None:
        """Does what is due at this time."""
        if self.ended or not self.is_changing:
            return
        if now >= self._ends_at:
            if self.number < 0:
                self._end(f"could not join within {self._limit_s:g} s: nobody has let it in")
            else:
                limit = _LIMIT * self._patience_s
                self._end(f"could not agree on view {self.number + 1} within {limit:g} s")
        elif self.number < 0:
            if now >= self._act_at:
                self._act_at = now + self._patience_s
                self._send(self._contacts, Message(JOIN, 0))
        else:
            self._go_on(now)

    def hear(self, now: float, sender: int, message: Message) -> None:
        """Takes in a message from another rank."""
        is_dead = sender in self.believes.dead
        if self.ended or (is_dead and message.kind != COMMIT):  # whoever tells it, it was agreed
            return
        if message.kind == GONE:
            self.suspect(now, sender, died=True)
            return
        if message.kind == JOIN:
            self._hear_join(now, sender)
        elif message.kind == COMMIT:
            if message.number > self.number:
                self._enter(now, message.number, message.members)
        elif self.number < 0 and self.me not in message.base:
            return  # this rank is no member yet
        elif message.number <= self.number:
            if message.kind in (WANT, PREPARE, ACCEPT):
                self._tell_view([sender])
        else:
            if message.number > self.number + 1:
                self._enter(now, message.number - 1, message.base)
            if not self.ended:
                self._take_part(now, sender, message)
        if not self.ended and self.is_changing and self.number >= 0:
            self._go_on(now)

    # ---- as a member ----

    def _begin(self, now: float) -> None:
        """Leaves what the old view was doing; does nothing if that is left already."""
        if self.is_changing:
            return
        self.is_changing = True
        self._ends_at = now + _LIMIT * self._patience_s
        self._act_at = self._turn(now)
        self._send(self._others(), self._message(WANT))

    def _turn(self, now: float) -> float:
        """Returns when this rank proposes, if no other rank does before."""
        return now + self._patience_s * self.believes.alive(self.members).index(self.me)

    def _hear_join(self, now: float, newcomer: int) -> None:
        if self.number < 0:
            self._asking.add(newcomer)
            self._end_if_in_vain()
        elif newcomer in self.members:
            self._tell_view([newcomer])
        elif newcomer not in self.believes.lost:
            self.believes.waiting.add(newcomer)
            if not self._holds_joins:
                self.believes.joins.add(newcomer)
                self._begin(now)

    def _take_part(self, now: float, sender: int, message: Message) -> None:
        """Takes part in the agreement on the next view."""
        self._round = max(self._round, message.ballot[0])
        self.believes.hear(message, self.members)
        self._begin(now)
        for rank in message.dead:
            if rank not in self.believes.dead:
                self.suspect(now, rank, died=True)
        if self.ended or message.number != self.number + 1:
            return  # the lines above may have changed both
        if message.kind in (PREPARE, ACCEPT):
            self._answer(now, sender, message)
        elif message.kind == REFUSE:
            if self._lead is not None and message.ballot > self._lead.ballot:
                self._step_back(now, message.ballot[1])
        elif self._lead is not None and message.ballot == self._lead.ballot:
            if message.kind == PROMISE:
                self._lead.promises[sender] = message
            elif message.kind == ACCEPTED:
                self._lead.accepts.add(sender)

    def _answer(self, now: float, sender: int, message: Message) -> None:
        """Promises, or accepts, or refuses where there is a higher ballot."""
        ballot = message.ballot
        is_known = message.kind == ACCEPT and ballot == self._promised
        if ballot <= self._promised and not is_known:
            self._send([sender], replace(self._message(REFUSE), ballot=self._promised))
            return
        self._promised = ballot
        self._step_back(now, sender)
        if message.kind == ACCEPT:
            self._accepted = ballot, message.members
            self._send([sender], replace(self._message(ACCEPTED), ballot=ballot))
        else:
            self._send([sender], self._promise(ballot))

    def _promise(self, ballot: Ballot) -> Message:
        accepted, members = self._accepted
        message = self._message(PROMISE)
        return replace(message, ballot=ballot, accepted=accepted, members=members)

    def _step_back(self, now: float, leader: int) -> None:
        """Lets another rank lead, and gives it the time that it may take, unless it is lost."""
        self._lead = None
        time_of_a_ballot = 0.0 if leader in self.believes.dead else 3 * self._patience_s
        self._act_at = self._turn(now) + time_of_a_ballot

    # ---- as the proposer ----

    def _go_on(self, now: float) -> None:
        """Leads the agreement on, as far as a step is due."""
        while not self.ended and self.is_changing:
            if self._lead is None and now < self._act_at:
                return
            lead = self._lead or self._prepare(now)
            go_on = self._commit_if_accepted if lead.accepts else self._propose_if_promised
            if not go_on(now, lead):
                return

    def _prepare(self, now: float) -> Lead:
        self._round += 1
        ballot = self._promised = self._round, self.me
        self._lead = lead = Lead(ballot, now + self._patience_s, {self.me: self._promise(ballot)})
        self._send(self._others(), replace(self._message(PREPARE), ballot=ballot))
        return lead

    def _propose_if_promised(self, now: float, lead: Lead) -> bool:
        """Proposes once the promises are here; returns whether there is more to do now."""
        awaited = set(self._others()) - lead.promises.keys()
        if awaited and now < lead.deadline:
            return False
        self.believes.give_up(awaited)
        promises = lead.promises
        if not self._have_majority(promises):
            self._end(self._too_few(promises))
            return False
        newest = max(promises.values(), key=lambda promise: promise.accepted)
        members = newest.members if newest.accepted != NONE else self._choose(promises)
        if not members:
            return False
        lead.members, lead.deadline = members, now + self._patience_s
        lead.accepts = {self.me}
        self._accepted = lead.ballot, members
        self._send(promises, replace(self._message(ACCEPT), ballot=lead.ballot, members=members))
        return True

    def _choose(self, promises: dict[int, Message]) -> Ranks:
        """Returns the members of the next view; none if there can be none, which ends this rank."""
        opinions = {rank: {*promise.lost} for rank, promise in promises.items()}
        opinions[self.me] = self.believes.lost
        together = trusting(opinions)
        if not self._have_majority(together):
            self._end(self._too_few(together))
            return ()
        joins = self.believes.joins.difference(*(opinions[rank] for rank in together))
        staying = {*together} - self.believes.leaves | joins
        members = self._terms.whole(staying)
        if members.isdisjoint(self.members):
            members = set()
        if not self._terms.may_follow(members, staying, self.members):
            self._end(self._too_few(members))
            return ()
        return tuple(sorted(members))

    def _have_majority(self, ranks: Iterable[int]) -> bool:
        return is_majority(ranks, self.members, self.believes.dead)

    def _too_few(self, ranks: Iterable[int]) -> str:
        return self._terms.too_few(ranks, self.number, len(self.members))

    def _commit_if_accepted(self, now: float, lead: Lead) -> bool:
        """Commits once a majority has accepted; returns whether there is more to do now."""
        if self._have_majority(lead.accepts):
            everyone = {*self.members, *lead.members}
            self._enter(now, self.number + 1, lead.members)
            self._tell_view(everyone)
            return True
        awaited = lead.promises.keys() - lead.accepts - self.believes.lost
        if awaited and now < lead.deadline:
            return False
        self.believes.give_up(awaited)
        self._lead, self._act_at = None, now
        return True

    # ---- views ----

    def _enter(self, now: float, number: int, members: Ranks) -> None:
        """Enters the view that is committed; a rank that is no member of it ends."""
        if self.me not in members:
            if self.number >= 0:
                self.number, self.members = number, members
                self.ended = self.believes.why_outside(number)
            return
        self.number, self.members = number, members
        self.is_changing, self._ends_at = False, math.inf
        self._reset()
        if self.believes.enter(members):
            self._begin(now)

    def _end(self, reason: str) -> None:
        self.ended = reason
        self._send(self.members or self._contacts, Message(GONE, self.number))

    def _tell_view(self, ranks: Iterable[int]) -> None:
        self._send(ranks, Message(COMMIT, self.number, members=self.members))

    # ---- messages ----

    def _others(self) -> list[int]:
        return [rank for rank in self.believes.alive(self.members) if rank != self.me]

    def _message(self, kind: str) -> Message:
        return self.believes.tell(Message(kind, self.number + 1, self.members))

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        self.outbox += [(r, message) for r in ranks if r != self.me and r not in self.believes.dead]
