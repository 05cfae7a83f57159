"""Weather: what goes wrong for a while between two groups of peers.

Rules of this file. It says which rules apply to a message from one host to another; what
they do to it is network.py's business. What a link is like on any day is link.py's.

Theory of operation. A rule lies from one side to another and has an `Effect`: it blocks
(a partition), holds what is sent until it is lifted (a clog), or loses, copies and delays
more than the link itself does. Each direction of a rule has a bit. Whoever is on its
sending side has that bit in `sends`, whoever is on its hearing side in `hears`; so the
rules on a message are `sender.sends & addressee.hears`: one operation, however many
peers a partition divides. A side is a condition on hosts; who starts later is asked too,
and a peer that follows another one on the same computer stays where that was.

Bounds: a clog holds `HELD` messages; later ones are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.sim.host import Host

HELD = 100_000
"""Messages that one clog holds."""

Side = Callable[[Host], bool]
"""Who is on this side of a rule."""


def peers(ids: Iterable[PeerId]) -> Side:
    """These peers, also those that start later under one of these names."""
    chosen = frozenset(ids)
    return lambda host: host.peer_id in chosen


def zones(names: Iterable[str]) -> Side:
    """All peers of these zones."""
    chosen = frozenset(names)
    return lambda host: host.zone in chosen


def on_computers(addresses: Iterable[str]) -> Side:
    """Whoever lives at one of these addresses, now or later."""
    chosen = frozenset(addresses)
    return lambda host: any(address in chosen for address in host.addresses)


def all_but(side: Side) -> Side:
    """Everyone else."""
    return lambda host: not side(host)


def everyone(host: Host) -> bool:
    """A side that all are on."""
    return True


@dataclass(frozen=True)
class Effect:
    """What a rule does to the messages that it applies to."""

    blocks: bool = False
    """Nothing gets through, and nothing is kept."""
    holds: bool = False
    """Nothing gets through now: it arrives, in order, when the rule is lifted."""
    loss: float = 0.0
    """Probability of being lost, besides the link's own."""
    duplicate: float = 0.0
    delay: float = 0.0
    """Seconds that a message takes longer."""

    @property
    def cuts(self) -> bool:
        """Whether a connection gets nothing through while this lasts."""
        return self.blocks or self.holds


@dataclass(eq=False)
class Rule:
    """One effect, from one side to the other and, if it has two bits, back."""

    one: Side
    other: Side
    effect: Effect
    bits: tuple[int, ...]
    held: list[tuple[Host, Host, bytes]] = field(default_factory=list)
    """(sender, addressee, message), in order."""

    def mark(self, host: Host) -> None:
        """Note on this host which sides it is on."""
        for bit, (sending, hearing) in zip(
            self.bits, ((self.one, self.other), (self.other, self.one)), strict=False
        ):
            if sending(host):
                host.sends |= bit
            if hearing(host):
                host.hears |= bit


class Weather:
    """All rules that are in force."""

    def __init__(self) -> None:
        self._by_bit: dict[int, Rule] = {}

    def __bool__(self) -> bool:
        return bool(self._by_bit)

    def rules(self) -> list[Rule]:
        """Those in force, the oldest first."""
        return list(dict.fromkeys(self._by_bit.values()))

    def lay(
        self, hosts: Iterable[Host], one: Side, other: Side, effect: Effect, *, one_way: bool
    ) -> Rule:
        """Put a rule in force."""
        rule = Rule(one, other, effect, tuple(self._free_bits(1 if one_way else 2)))
        self._by_bit.update(dict.fromkeys(rule.bits, rule))
        for host in hosts:
            rule.mark(host)
        return rule

    def lift(self, hosts: Iterable[Host], rule: Rule) -> None:
        """End a rule; nothing happens if it has ended already."""
        if rule not in self._by_bit.values():
            return
        mask = 0
        for bit in rule.bits:
            del self._by_bit[bit]
            mask |= bit
        for host in hosts:
            host.sends &= ~mask
            host.hears &= ~mask

    def enrol(self, host: Host, predecessor: Host | None = None) -> None:
        """Who starts now is under the weather too, and where its predecessor was."""
        for rule in self.rules():
            rule.mark(host)
        if predecessor is not None:
            host.sends |= predecessor.sends
            host.hears |= predecessor.hears

    def between(self, sender: Host, addressee: Host) -> list[Rule]:
        """The rules on a message from one to the other, the oldest first."""
        return [self._by_bit[bit] for bit in _bits(sender.sends & addressee.hears)]

    def cuts(self, sender: Host, addressee: Host) -> bool:
        """Whether nothing gets from one to the other."""
        if not sender.sends & addressee.hears:
            return False
        return any(rule.effect.cuts for rule in self.between(sender, addressee))

    def _free_bits(self, wanted: int) -> Iterator[int]:
        bit = 1
        while wanted:
            if bit not in self._by_bit:
                wanted -= 1
                yield bit
            bit <<= 1


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit
