"""Ours: a published tensor, replicated. Used as a user does; the looks inside are marked.

Settings: `transports` (default: all), `bind` (default: loopback), `zone`, `host`, `replica` (a
target's name). `write` publishes the new bytes and waits until their digests are taken;
`withdraw_and_write` leaves that to `publish`, for a pull right after it.
"""

from __future__ import annotations

import time

from serving import Side, Span, Stopwatch, serve

import tensorhub_p2p as th

OPTIONS = ("transports", "bind", "zone", "host")
SETTLE_SECONDS = 60.0


class Holder(Side):
    peer: th.Peer | None = None

    def start(self, replica: str, seeds: list[str]) -> None:
        """Join, open and register."""
        options = {key: self.settings[key] for key in OPTIONS if key in self.settings}
        self.peer = th.Peer(
            cluster="benchmark", seeds=seeds, name=replica, insecure=True, **options
        )
        self.handle = self.peer.open("policy", replica=replica)
        self.handle.register([("weights", self.tensor)])

    def settle(self) -> None:
        """Until no more huge pages are asked for; a look inside."""
        if not self.peer._driver.huge_pages.settled(SETTLE_SECONDS):
            raise RuntimeError("huge pages are still being asked for")

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close()


class Source(Holder):
    def describe(self) -> str:
        self.start("trainer", [])
        self.version = 0
        return self.peer.address

    def withdraw(self) -> Span:
        with Stopwatch() as watch:
            if self.handle.version is not None:
                self.handle.unpublish()
        return watch.span

    def withdraw_and_write(self) -> None:
        self.withdraw()
        super().write()

    def publish(self) -> Span:
        self.version += 1
        with Stopwatch() as watch:
            self.handle.publish(self.version)
        return watch.span

    def write(self) -> None:
        self.withdraw_and_write()
        self.publish()
        driver = self.peer._driver  # a look inside
        while not driver.ask(
            lambda _now: driver.node.shards[self.handle._slot].server.manifest.complete
        ):
            time.sleep(0.002)


class Target(Holder):
    def connect(self, about: str) -> None:
        self.start(self.settings.get("replica", "rollout"), [about])
        while len(self.peer.members()) < 2:
            time.sleep(0.02)

    def hear_of(self, version: int) -> float:
        """Wait until it is known here; returns when it was."""
        self.handle.wait_for(version - 1)
        return time.monotonic()

    def take(self, version: int | str = "latest") -> Span:
        with Stopwatch() as watch:
            pull = self.handle.replicate(version)
        if pull.bytes != self.tensor.nbytes:
            raise RuntimeError(f"{pull.bytes} of {self.tensor.nbytes} bytes were moved")
        return watch.span

    def join_and_take(self, about: str, moment: float) -> Span:
        """At that moment, as one who is new: join, open, register and replicate."""
        time.sleep(max(0.0, moment - time.monotonic()))
        with Stopwatch() as watch:
            self.start(self.settings["replica"], [about])
            self.take()
        return watch.span

    def leave(self) -> None:
        self.peer.close()
        self.peer = None


if __name__ == "__main__":
    serve({"source": Source, "target": Target})
