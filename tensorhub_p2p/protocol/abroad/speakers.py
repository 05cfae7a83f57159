"""Whom to ask in another zone, and which zones are worth asking.

Rules of this file. It reads what zones say of themselves (`ZoneSummary`) and remembers who
answered; it sends nothing.

Theory of operation. A summary names the newest whole version of each model in its zone: who
looks for a model asks those zones. A summary that is full has room for no more models: its zone
is asked for any model, but nobody is told of news of those that it doesn't name. It also names
the zone's gateways, and after them those next in line. Who asks starts with the gateway that
answered last, or one of the first `gateways` by the own id, so that the zone's askers spread;
then it goes on through all that are named.

Bounds: one peer remembered a zone, for zones that are in the summaries only.
"""

from __future__ import annotations

from collections.abc import Callable

import mmh3

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.membership.summaries import MAX_MODELS
from tensorhub_p2p.protocol.messages import ZoneSummary

Order = tuple[int, int]


class Speakers:
    """What one peer knows of the other zones.

    `summaries` are the newest known ones; of those named in one the first `gateways` are
    gateways, and the others are only if one of these is gone.
    """

    def __init__(
        self,
        me: PeerId,
        home: str,
        gateways: int,
        summaries: Callable[[], tuple[ZoneSummary, ...]],
    ) -> None:
        self._home = home
        self._gateways = gateways
        self._summaries = summaries
        self._turn = mmh3.hash(me, signed=False) % gateways
        self._last: dict[str, PeerId] = {}
        """By zone: who answered last."""

    def with_model(self, model: str) -> tuple[str, ...]:
        """The other zones that may have a whole version of the model, as far as they say."""
        return tuple(
            summary.zone
            for summary in self._summaries()
            if summary.zone != self._home
            and (len(summary.newest) >= MAX_MODELS or any(h.model == model for h in summary.newest))
        )

    def named(self, zone: str, model: str) -> Order | None:
        """The newest version of the model in that zone, as it says itself."""
        return next((o for summary, o in self._naming(model) if summary.zone == zone), None)

    def elsewhere(self, model: str) -> Order | None:
        """The newest version of the model in any other zone, as they say."""
        return max((order for _, order in self._naming(model)), default=None)

    def _naming(self, model: str) -> list[tuple[ZoneSummary, Order]]:
        return [
            (summary, (hint.epoch, hint.version))
            for summary in self._summaries()
            if summary.zone != self._home
            for hint in summary.newest
            if hint.model == model
        ]

    def speaker(self, zone: str, attempt: int) -> PeerId | None:
        """Whom to ask at this attempt, the first is number 0; None if nobody is known."""
        named = next((s.gateways for s in self._summaries() if s.zone == zone), ())
        peers = [info.peer_id for info in named]
        if not peers:
            return None
        first, others = peers[: self._gateways], peers[self._gateways :]
        turn = self._turn % len(first)
        line = [*first[turn:], *first[:turn], *others]
        line.sort(key=lambda peer: peer != self._last.get(zone))
        return line[attempt % len(line)]

    def answered(self, zone: str, peer: PeerId) -> None:
        """This one speaks for the zone: ask it first the next time."""
        self._last[zone] = peer

    def is_mute(self, zone: str, peer: PeerId) -> None:
        """This one does not answer, or is no gateway: begin with another one."""
        if self._last.get(zone) == peer:
            del self._last[zone]
