"""Who is told when a key changes, at one owner.

Rules of this file. A `Watchers` remembers who asked to be told and tells them; what changed
is the owner's business.

Theory of operation. Changes are pushed: several of one batch are told once. A push may be
lost, so a watcher says when it asks again, well before its watch lapses, what it has seen
(a fingerprint, registers.py): if the key is another one, it is told at once.

What bounds it: `max_watchers` a key, `max_keys` keys; who comes beyond that is told nothing
(whoever waits looks by itself, at growing pauses). A watch that isn't renewed lapses.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import DirectoryChanged, DirectoryWatch, Key, Message

Post = Callable[[float, PeerId, Message], None]


class Watchers:
    """The watchers at one owner."""

    def __init__(self, config: DirectoryConfig, post: Post) -> None:
        self._config = config
        self._post = post
        self._watchers: dict[Key, dict[PeerId, float]] = {}
        """With the time at which each watch lapses."""
        self._changed: dict[Key, None] = {}
        self._tell_at: float | None = None

    def __len__(self) -> int:
        return len(self._watchers)

    def watch(self, now: float, sender: PeerId, message: DirectoryWatch, print_now: int) -> None:
        """`print_now` is the key's fingerprint here, 0 if that is not to be relied on."""
        watchers = self._watchers.setdefault(message.key, {})
        if message.seconds > 0:
            seconds = min(message.seconds, 2 * self._config.watch_seconds)
            if sender in watchers or len(watchers) < self._config.max_watchers:
                watchers[sender] = now + seconds
                if message.seen and print_now and message.seen != print_now:
                    self._post(now, sender, DirectoryChanged(message.key))
        else:
            watchers.pop(sender, None)
        if not watchers or len(self._watchers) > self._config.max_keys:
            del self._watchers[message.key]

    def changed(self, now: float, key: Key) -> None:
        """Tell the key's watchers, with the next `tick`."""
        if key in self._watchers:
            self._changed[key] = None
            self._tell_at = now if self._tell_at is None else self._tell_at

    def tick(self, now: float) -> None:
        if self._tell_at is None:
            return
        changed, self._changed, self._tell_at = self._changed, {}, None
        for key in changed:
            for peer, until in list(self._watchers.get(key, {}).items()):
                if now < until:
                    self._post(now, peer, DirectoryChanged(key))

    def next_wakeup(self) -> float | None:
        return self._tell_at

    def sweep(self, now: float) -> None:
        """Drop lapsed watches."""
        for key, watchers in list(self._watchers.items()):
            for peer in [peer for peer, until in watchers.items() if until <= now]:
                del watchers[peer]
            if not watchers:
                del self._watchers[key]
