"""Fading: which other zones have said nothing for so long that they are taken for gone.

Rules of this file. A table of times. What a zone said is kept by summaries.py; zones.py spreads the
obituary of a zone that fades, lists it no more, and calls whom it named just now and then.

Theory of operation. A zone that lives writes its summary anew now and then, changes or not
(authoring.py); each one that is news here renews the zone. One that wasn't renewed for `after`
fades: as long as the dead are looked for (`forget_dead_after`), and several times as long as
a living zone is silent. Who finds that out first tells all others by an obituary (summaries.py):
it is the same whoever writes it, and the news of the zone's end reaches newcomers and those that
slept as any other. The zone's next summary brings it back: who was cut off has counted further,
and who starts it anew hears of the obituary among the gateways, and counts on from there. An old
one that somebody repeats is no news, and brings nothing back.

A peer that did not run itself has heard nobody: it counts anew (`hold`).

Bounds: a time for each zone of which a summary is kept.
"""

from __future__ import annotations


class Fading:
    """The other zones that are there, as one peer has heard of them."""

    def __init__(self, after: float) -> None:
        self._after = after
        self._heard: dict[str, float] = {}
        """When a zone was last renewed, the longest ago first."""

    def heard(self, now: float, zone: str) -> None:
        """It said something new."""
        self._heard.pop(zone, None)
        self._heard[zone] = now

    def is_over(self, zone: str) -> None:
        """Somebody else found that it has faded."""
        self._heard.pop(zone, None)

    def hold(self, now: float) -> None:
        """This peer could hear nobody until now."""
        self._heard = dict.fromkeys(self._heard, now)

    def tick(self, now: float) -> list[str]:
        """Those that fade now."""
        faded = []
        while (due := self.next_wakeup()) is not None and now >= due:
            zone = next(iter(self._heard))
            del self._heard[zone]
            faded.append(zone)
        return faded

    def next_wakeup(self) -> float | None:
        """When the next zone fades, if it stays silent."""
        return next((at + self._after for at in self._heard.values()), None)
