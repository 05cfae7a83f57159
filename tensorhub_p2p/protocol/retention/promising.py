"""The promise: a holder keeps a shard for somebody who gives it up.

Rules of this file. `Promise` is the giver's side: whether a slot says yes, and how long that
binds it. `Plea` is the asker's: whom it asks, what counts as an answer. Neither knows why a
version has to be kept, nor what follows; withdrawing.py does.

Theory of operation (DESIGN, "Retention is a direct promise"). Whoever may not be the last one
to give a shard up marks itself as withdrawing, asks one whole and reliable holder, and hides
only with a yes in its hands, or a copy of its own making. Of each yes three things are kept:

 1. The giver has all of it, and either doesn't withdraw, or makes a copy for itself, or
    ranks before the asker (lowest hash first) and is not past the point of return.
 2. It binds (see below). Whoever gave one and withdraws later has to find a yes, or make a
    copy, itself.
 3. Who gives one while it asks itself begins anew: of its own pleas only those count that
    were made after the last yes it gave (`Plea.again`).

Why that is enough. Let w1 have hidden with the yes of w2, w2 with that of w3, and so on, and
let I(w) be when w made the plea that was answered. By 2 and 3, I(w2) comes after w2's yes to
w1, which comes after I(w1): so I(w1) < I(w2) < ... and the chain never closes. It ends at
somebody who hasn't hidden, or who made a copy that stays by the same rule. The rank is needed
for progress only: it decides who of several that withdraw at once stays, so that not all of
them make a copy.

What a promise is worth. Its giver reads the retains itself when it withdraws. In one zone that
read shows what the asker knew, or that it is wanted no more: there a promise binds only a
withdrawal whose read had begun before. Retains of other zones may have come to the asker and
not yet to the giver: so where there are any, it binds for `promise_seconds`.

Answers that are lost are no yes. A copy of an old answer names an old request. A giver that
dies takes its promise with it, as a holder that dies takes its copy.

Bounds: one promise a slot, as it holds one publication at a time; one plea under way a
withdrawal, `max_asked` holders each, `promise_patience` for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import mmh3

from tensorhub_p2p.config import RetentionConfig
from tensorhub_p2p.protocol.directory.records import slot_name
from tensorhub_p2p.protocol.groups.selection import Copy
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.messages import KeepAnswer, KeepAsk, Message

Holder = tuple[PeerId, Slot]
Rank = tuple[int, PeerId, str]


def rank(publication: Publication, holder: Holder) -> Rank:
    """The order among holders that withdraw at once: who comes first, stays."""
    peer, slot = holder
    name = slot_name(slot)
    return (mmh3.hash64(f"{publication!r}\0{peer}\0{name}", 2, True, signed=False)[0], peer, name)


class Stance(Enum):
    """What a slot that is asked has to say for itself."""

    HOLDS = "holds it"
    COPIES = "makes a copy of it"
    WITHDRAWS = "withdraws it"
    GIVES_UP = "gives it up"


class Promise:
    """The giver's side: of one slot, for what it holds."""

    def __init__(self, config: RetentionConfig) -> None:
        self._config = config
        self._given: tuple[Publication, float] | None = None

    def consider(
        self, now: float, stance: Stance, me: Holder, sender: PeerId, ask: KeepAsk
    ) -> bool:
        """Say yes, and be bound by it, if the rules allow."""
        asker = (sender, ask.asker or ask.slot)
        yes = stance in {Stance.HOLDS, Stance.COPIES} or (
            stance is Stance.WITHDRAWS and rank(ask.publication, me) < rank(ask.publication, asker)
        )
        if yes:
            self.bind(now, ask.publication)
        return yes

    def bind(self, now: float, publication: Publication) -> None:
        self._given = (publication, now)

    def binds(self, now: float, publication: Publication) -> bool:
        """Whether it was promised, and lately: later what is on record decides."""
        return self.binds_since(publication, now - self._config.promise_seconds)

    def binds_since(self, publication: Publication, time: float) -> bool:
        """Whether it was promised at that time, or later."""
        return self._given is not None and self._given[0] == publication and self._given[1] >= time


@dataclass(frozen=True)
class Candidate:
    """Somebody to ask, and the slot that the question is for."""

    peer: PeerId
    slot: Slot


def keepers(
    copies: Iterable[Copy],
    publication: Publication,
    me: Holder,
    is_responsive: Callable[[PeerId], bool],
    is_near: Callable[[PeerId], bool],
) -> list[Candidate]:
    """Whom to ask, the best first: who means to stay, then who withdraws and ranks first."""

    def reluctance(copy: Copy) -> tuple[object, ...]:
        order = rank(publication, (copy.peer, copy.slot))
        far, silent = not is_near(copy.peer), not is_responsive(copy.peer)
        return (copy.withdrawing, silent, far, copy.live, not copy.offload, order)

    mine = rank(publication, me)
    others = [
        copy
        for copy in copies
        if (copy.peer, copy.slot) != me
        and (not copy.withdrawing or rank(publication, (copy.peer, copy.slot)) < mine)
    ]
    return [Candidate(copy.peer, copy.slot) for copy in sorted(others, key=reluctance)]


class Verdict(Enum):
    """How a plea ended."""

    KEPT = "somebody keeps it"
    IN_VAIN = "nobody does"


class Plea:
    """The asker's side: one candidate after the other, until one says yes.

    `ended` is called once with how it ended; `ask` makes the message for a candidate.
    """

    def __init__(
        self,
        outbox: Outbox,
        numbers: Callable[[], int],
        config: RetentionConfig,
        ask: Callable[[int, Candidate], KeepAsk],
        ended: Callable[[float, Verdict], None],
    ) -> None:
        self._outbox = outbox
        self._numbers = numbers
        self._config = config
        self._ask = ask
        self._ended = ended
        self._left: list[Candidate] = []
        self._asked: Candidate | None = None
        self._request = 0
        self._until = 0.0
        self._repeat_at: float | None = None
        self.refused: list[str] = []
        """What those who said no gave as the reason."""

    def begin(self, now: float, candidates: Sequence[Candidate]) -> None:
        self.refused = []
        self._left = list(candidates[: self._config.max_asked])
        self._next(now)

    @property
    def asked(self) -> PeerId | None:
        """Who has the question, while there is one."""
        return self._asked.peer if self._asked is not None else None

    def _next(self, now: float) -> None:
        self._asked = self._left.pop(0) if self._left else None
        if self._asked is None:
            self.stop()
            self._ended(now, Verdict.IN_VAIN)
            return
        self._send_anew(now)

    def _send_anew(self, now: float) -> None:
        self._request = self._numbers()
        self._until = now + self._config.promise_patience
        self._send(now)

    def _send(self, now: float) -> None:
        assert self._asked is not None
        self._repeat_at = now + self._config.promise_patience / 2
        self._outbox.send(self._asked.peer, self._ask(self._request, self._asked))

    def again(self, now: float) -> None:
        """A yes was given by the one who asks here: no answer to what was asked before counts."""
        if self._asked is not None:
            self._send_anew(now)

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        asked = self._asked
        if not isinstance(message, KeepAnswer) or asked is None:
            return
        if sender != asked.peer or message.request != self._request:
            return
        if message.yes:
            self.stop()
            self._ended(now, Verdict.KEPT)
        elif message.working:
            self._until = max(self._until, now + 3 * self._config.promise_patience)
        else:
            self.refused.append(message.why)
            self._next(now)

    def stop(self) -> None:
        """Want no answer any more."""
        self._left, self._asked, self._repeat_at = [], None, None

    def tick(self, now: float) -> None:
        if self._asked is None:
            return
        if now >= self._until:
            self._next(now)
        elif self._repeat_at is not None and now >= self._repeat_at:
            self._send(now)

    def next_wakeup(self) -> float | None:
        if self._asked is None or self._repeat_at is None:
            return None
        return min(self._until, self._repeat_at)
