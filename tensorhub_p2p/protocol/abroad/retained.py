"""What is retained in which zone: read at home, told to the others, and heard from them.

Rules of this file. At its zone's gateways a `Retained` reads what the zone's peers want
kept, for the zone's summary; at every peer it says what other zones' summaries tell. What
follows from a retain is retention.py's.

Theory of operation. A retain is on record in its retainer's zone only (retaining.py). Each
gateway reads the retains keys of all models that any zone names, each `notice_interval`, and
sums each up: the most of the "newest", and all single versions. So whichever of them writes the
zone's summary has it at hand (authoring.py). A model whose key can't be read keeps what was said
of it before, as every model does until a new gateway has read it: in doubt a version is kept.
A zone that is silent is taken at its last word; only its obituary ends that.

While there is one zone only, nothing is read.

Bounds: `MAX_MODELS` models, the ones with the newest news, and `MAX_VERSIONS` single versions of
each; one read a model at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tensorhub_p2p.config import RetentionConfig
from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import Records, Registers, retains_key, values
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.membership.summaries import MAX_MODELS, is_obituary
from tensorhub_p2p.protocol.messages import Retain, RetainSummary, ZoneSummary

MAX_VERSIONS = 64


class Zones(Protocol):
    """Zones, as far as this is concerned."""

    zone: str

    def zones(self) -> tuple[ZoneSummary, ...]: ...

    def gateways(self) -> tuple[PeerId, ...]: ...


class Retained:
    """What one peer knows of it."""

    def __init__(self, me: PeerId, zones: Zones, records: Records, config: RetentionConfig) -> None:
        self._me = me
        self._zones = zones
        self._records = records
        self._interval = config.notice_interval
        self._read: dict[str, RetainSummary] = {}
        """By model: what was read last, at a gateway."""
        self._inquiries: dict[str, Inquiry] = {}
        self._look_at: float | None = 0.0

    # --- at the gateways ---

    @property
    def _speaks(self) -> bool:
        """Whether it writes the zone's summary, or may be the next to do so."""
        own = next((s for s in self._zones.zones() if s.zone == self._zones.zone), None)
        writes = own is not None and bool(own.gateways) and own.gateways[0].peer_id == self._me
        return writes or self._me in self._zones.gateways()

    def tick(self, now: float) -> None:
        if self._look_at is None or now < self._look_at:
            return
        self._look_at = now + self._interval
        if not self._speaks:
            self._forget()
            return
        models = self._models()
        for model in [model for model in self._inquiries if model not in models]:
            self._inquiries.pop(model).stop()
            self._read.pop(model, None)
        for model in models:
            if model not in self._inquiries:
                then = self._reader(model)
                self._inquiries[model] = Inquiry(self._records, retains_key(model), then)
            self._inquiries[model].look(now)

    def _forget(self) -> None:
        for inquiry in self._inquiries.values():
            inquiry.stop()
        self._inquiries, self._read = {}, {}

    def _models(self) -> list[str]:
        """All that any zone names, while there is more than one."""
        summaries = self._zones.zones()
        if not any(summary.zone != self._zones.zone for summary in summaries):
            return []
        retained = [each.model for s in summaries for each in s.retains]
        named = [hint.model for s in summaries for hint in s.newest]
        return list(dict.fromkeys([*retained, *named]))[:MAX_MODELS]

    def _reader(self, model: str) -> Callable[[float, Registers], None]:
        def then(_now: float, registers: Registers) -> None:
            retains = [value for _, value in values(registers, Retain)]
            newest = max((retain.newest for retain in retains), default=0)
            versions = sorted({version for retain in retains for version in retain.versions})
            self._read[model] = RetainSummary(model, newest, tuple(versions[-MAX_VERSIONS:]))

        return then

    def said(self, known: ZoneSummary | None) -> tuple[RetainSummary, ...]:
        """For the next summary of the own zone; `known` is the one before."""
        before = {each.model: each for each in known.retains} if known is not None else {}
        now = before | self._read
        return tuple(now[m] for m in sorted(now) if now[m].newest or now[m].versions)[:MAX_MODELS]

    # --- at every peer ---

    def elsewhere(self, model: str) -> list[tuple[str, RetainSummary]]:
        """By zone: what other zones want kept of the model."""
        return [
            (summary.zone, each)
            for summary in self._zones.zones()
            if summary.zone != self._zones.zone and not is_obituary(summary)
            for each in summary.retains
            if each.model == model
        ]

    def next_wakeup(self) -> float | None:
        return self._look_at
