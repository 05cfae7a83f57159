"""What the group protocols ask of the directory, and of membership.

Rules of this file: interfaces and pure readings of registers only. The machines of groups
see the directory through `Records`, and no other way: a read or write is asked until it is
answered (deadlines belong to the verb that waits), and the answer arrives as a call of
`then`, with the time, after the asking call returned.

All of it is about the directory of the own zone, unless the call says otherwise: `enough`
says when what the own zone holds does for a read, `zone` where a write belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from tensorhub_p2p.protocol.directory.registers import Mark
from tensorhub_p2p.protocol.identity import Group, PeerId, Slot
from tensorhub_p2p.protocol.messages import Key, Register, Value

Registers = tuple[Register, ...]
Enough = Callable[[Registers], bool]
"""Whether the own zone's registers do, so that no other zone need be asked."""
V = TypeVar("V", bound=Value)


def everywhere(_registers: Registers) -> bool:
    """The `Enough` of who wants to know what all zones hold."""
    return False


class Refused:
    """An owner refused a write; `because` is the register that forbids it."""

    def __init__(self, reason: str, because: Register | None) -> None:
        self.reason = reason
        self.because = because


class Records(Protocol):
    """The directory, as one peer's group protocols use it."""

    def read(
        self,
        now: float,
        key: Key,
        then: Callable[[float, Registers], None],
        enough: Enough | None = None,
        near: str = "",
        *,
        agreed: bool = False,
    ) -> int:
        """Read from R owners; withdrawn registers are left out. Returns a number to cancel by.

        With `enough`, and if it says no: together with what the other zones hold that have the
        model, and answer in time. With `near`, the name of a replica: what of a key with very many
        writers lies together with that replica's records (buckets.py); not all of it then.
        With `agreed`: of the own zone only what W owners are known to hold, so that every read
        that begins later sees it, too.
        """

    def write(
        self,
        now: float,
        key: Key,
        name: str,
        generation: int,
        value: Value | None,
        then: Callable[[float, Refused | None], None],
        zone: str = "",
    ) -> int:
        """Write the own register `name` to W owners (in that `zone`); None withdraws it.

        A later write of the same register replaces one that is still under way: then nobody
        is told how that one ended.
        """

    def write_and_look(
        self,
        now: float,
        key: Key,
        name: str,
        generation: int,
        value: Value,
        then: Callable[[float, Refused | None, Registers | None], None],
        *,
        agreed: bool = False,
    ) -> int:
        """`write` in the own zone, and look what stands there then, in one round trip.

        Of two peers that write and look one sees the other's write, as if each had read after its
        own. `then` gets None where that couldn't be had: too many registers, or an owner didn't
        answer at once. Who needs it reads then. `agreed` as for `read`.
        """

    def mark(
        self,
        now: float,
        key: Key,
        value: Mark,
        then: Callable[[float, Refused | None], None],
        zone: str = "",
    ) -> int:
        """Write a mark that belongs to nobody to W owners (in that `zone`)."""

    def forget(self, now: float, key: Key, name: str) -> None:
        """Nobody needs any more what the own register `name` says (in the own zone).

        It is withdrawn in a while, unless it is written again before; its writer may be gone
        by then.
        """

    def cancel(self, request: int) -> None:
        """Forget a request: its `then` is not called any more."""

    def watch(
        self, now: float, key: Key, then: Callable[[float], None], *, pins: bool = False
    ) -> int:
        """Call `then` whenever the key changed; of `pins`, too, or not. May call it for nothing."""

    def unwatch(self, now: float, watch: int) -> None: ...

    def known(self, key: Key) -> Registers | None:
        """What a watched key of the own zone holds, as far as was read and told since.

        None: nothing was read, or something changed since and it wasn't told what. It is as good
        as a read of some moments ago, from one owner: whoever has to be sure reads.
        """

    def elsewhere(self, model: str) -> tuple[int, int] | None:
        """The highest (epoch, version) that another zone says it has; None if none has any."""


class Liveness(Protocol):
    """Membership, as the group protocols use it."""

    @property
    def home(self) -> str:
        """The own zone."""

    def zone(self, peer: PeerId) -> str:
        """The zone of a peer that a register named; the own one unless it is known better."""

    def is_gone(self, peer: PeerId, zone: str = "") -> bool:
        """Declared dead, or left. A peer that was never heard of is not gone but new.

        Of a peer of another zone that is only known there: name the `zone`, and ask again.
        """

    def is_responsive(self, peer: PeerId) -> bool:
        """Not known to be silent, or gone."""

    def name(self, peer: PeerId) -> str:
        """The peer's name and id, for messages to people."""


def versions_key(model: str) -> Key:
    return Key("versions", model)


def holders_key(model: str, shard: int) -> Key:
    return Key("holders", model, str(shard))


def retains_key(model: str) -> Key:
    return Key("retains", model)


def group_key(group: Group) -> Key:
    return Key("group", group.model, group.replica)


def fence_name(group: Group) -> str:
    """The name of the register that tells the owners of the versions key of a generation."""
    return f"generation/{group.replica}"


def floor_name(group: Group) -> str:
    """The name of the register that keeps a group's floor, at the group's key."""
    return f"floor/{group.replica}"


def slot_name(slot: Slot) -> str:
    """The name of a slot's registers at every key: shard first, as replica names are free text."""
    return f"{slot.shard}@{slot.group.replica}"


def values(registers: Iterable[Register], kind: type[V]) -> Iterator[tuple[Register, V]]:
    """The registers that hold a value of this kind, with the value."""
    for register in registers:
        if isinstance(register.value, kind):
            yield register, register.value
