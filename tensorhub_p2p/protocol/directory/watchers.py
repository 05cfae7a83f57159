"""Who is told when a key changes, at one owner.

Rules of this file. A `Watchers` remembers who asked to be told and tells them; what changed
is the owner's business.

Theory of operation. Changes are pushed, with the registers that rose, so that who watches need
not ask; several of one batch are told once, and beyond `MOST_TOLD` of them only that something
changed. Nobody is told of what it wrote itself: the answer to its write says that; and of pins
only who asked for that, as thousands may pin what thousands watch. A push may be lost, so a
watcher says when it asks again, well before its watch lapses, what it knows (a fingerprint,
registers.py, without pins): if the key is another one, it is told at once.

What bounds it: `max_watchers` a key, `max_keys` keys; who comes beyond that is told nothing
(whoever waits looks by itself, at growing pauses). A watch that isn't renewed lapses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.registers import is_pin
from tensorhub_p2p.protocol.identity import NOBODY, PeerId
from tensorhub_p2p.protocol.messages import (
    DirectoryChanged,
    DirectoryWatch,
    Key,
    Message,
    Register,
)

Post = Callable[[float, PeerId, Message], None]
MOST_TOLD = 16
"""Registers in one push: what comes in such numbers is rather read once."""


Risen = tuple[Register, PeerId | None]
"""A register that rose, and who sent it; nobody, if it came by a merge."""


@dataclass(frozen=True)
class Watch:
    """Of one peer, of one key."""

    until: float
    """When it lapses."""
    pins: bool
    """Whether it wants to be told of pins."""


class Watchers:
    """The watchers at one owner."""

    def __init__(self, config: DirectoryConfig, post: Post) -> None:
        self._config = config
        self._post = post
        self._watchers: dict[Key, dict[PeerId, Watch]] = {}
        self._changed: dict[Key, list[Risen]] = {}
        """What rose since the watchers were told last."""
        self._tell_at: float | None = None

    def __len__(self) -> int:
        return len(self._watchers)

    def watch(self, now: float, sender: PeerId, message: DirectoryWatch, print_now: int) -> None:
        """`print_now` is the key's fingerprint here, 0 if that is not to be relied on."""
        watchers = self._watchers.setdefault(message.key, {})
        if message.seconds > 0:
            seconds = min(message.seconds, 2 * self._config.watch_seconds)
            if sender in watchers or len(watchers) < self._config.max_watchers:
                watchers[sender] = Watch(now + seconds, message.pins)
                if message.seen and print_now and message.seen != print_now:
                    self._post(now, sender, DirectoryChanged(message.key))
        else:
            watchers.pop(sender, None)
        if not watchers or len(self._watchers) > self._config.max_keys:
            del self._watchers[message.key]

    def changed(
        self, now: float, key: Key, risen: Iterable[Register], sender: PeerId | None
    ) -> None:
        """Tell the key's watchers, with the next `tick`."""
        if key in self._watchers:
            self._changed.setdefault(key, []).extend((register, sender) for register in risen)
            self._tell_at = now if self._tell_at is None else self._tell_at

    def tick(self, now: float) -> None:
        if self._tell_at is None:
            return
        changed, self._changed, self._tell_at = self._changed, {}, None
        for key, risen in changed.items():
            for peer, watch in list(self._watchers.get(key, {}).items()):
                if now < watch.until:
                    self._tell(now, key, peer, watch.pins, risen)

    def _tell(self, now: float, key: Key, watcher: PeerId, pins: bool, risen: list[Risen]) -> None:
        news = {
            register.cell: register
            for register, sender in risen
            if (pins or not is_pin(register)) and not _knows(watcher, register, sender)
        }
        if news:
            registers = tuple(news.values()) if len(news) <= MOST_TOLD else ()
            self._post(now, watcher, DirectoryChanged(key, registers))

    def next_wakeup(self) -> float | None:
        return self._tell_at

    def sweep(self, now: float) -> None:
        """Drop lapsed watches."""
        for key, watchers in list(self._watchers.items()):
            for peer in [peer for peer, watch in watchers.items() if watch.until <= now]:
                del watchers[peer]
            if not watchers:
                del self._watchers[key]


def _knows(watcher: PeerId, register: Register, sender: PeerId | None) -> bool:
    """It wrote this itself; marks are by nobody."""
    return watcher in (register.writer, sender if register.writer == NOBODY else None)
