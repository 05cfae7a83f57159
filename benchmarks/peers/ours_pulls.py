"""Ours: a published tensor, replicated. Used as a user does; the look inside is marked.

Settings: `transports` (default: all), `bind` (default: loopback). `write` publishes the new
bytes and waits until their digests are taken; `withdraw_and_write` leaves that to `publish`,
for a pull right after it.
"""

from __future__ import annotations

import time

from serving import Side, Span, Stopwatch, serve

import tensorhub_p2p as th


class Holder(Side):
    replica = ""
    settings_of_peer = ("transports", "bind")

    def start(self, seeds: list[str]) -> None:
        options = {key: self.settings[key] for key in self.settings_of_peer if key in self.settings}
        self.peer = th.Peer(
            cluster="benchmark", seeds=seeds, name=self.replica, insecure=True, **options
        )
        self.handle = self.peer.open("policy", replica=self.replica)
        self.handle.register([("weights", self.tensor)])

    def close(self) -> None:
        self.peer.close()


class Source(Holder):
    replica = "trainer"

    def describe(self) -> str:
        self.start([])
        self.version = 0
        return self.peer.address

    def withdraw_and_write(self) -> None:
        if self.version:
            self.handle.unpublish()
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
    replica = "rollout"

    def connect(self, about: str) -> None:
        self.start([about])
        while len(self.peer.members()) < 2:
            time.sleep(0.02)

    def take(self) -> Span:
        with Stopwatch() as watch:
            pull = self.handle.replicate("latest")
        if pull.bytes != self.tensor.nbytes:
            raise RuntimeError(f"{pull.bytes} of {self.tensor.nbytes} bytes were moved")
        return watch.span


if __name__ == "__main__":
    serve({"source": Source, "target": Target})
