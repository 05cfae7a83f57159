"""The simulated network: what arrives, what doesn't, and that a seed repeats a run."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event, Outbox
from tensorhub_p2p.protocol.messages import Ack, Message, Ping
from tensorhub_p2p.sim.network import Link, SimNetwork

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class Heard(Event):
    def __init__(self, message: Message) -> None:
        self.message = message


class Pinger:
    """Pings `to` every `interval` seconds, acknowledges pings, and notes what it hears."""

    def __init__(self, to: PeerId | None = None, interval: float = 1.0) -> None:
        self.to, self.interval, self.due, self.seq = to, interval, 0.0, 0
        self.outbox = Outbox()
        self.heard: list[tuple[float, PeerId, Message]] = []
        self.ticks: list[float] = []

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        self.heard.append((now, sender, message))
        self.outbox.emit(Heard(message))
        if isinstance(message, Ping):
            self.outbox.send(sender, Ack(message.seq))

    def tick(self, now: float) -> None:
        if self.to is not None and now >= self.due:
            self.ticks.append(now)
            self.due = now + self.interval
            self.seq += 1
            self.outbox.send(self.to, Ping(self.seq))

    def next_wakeup(self) -> float | None:
        return self.due if self.to is not None else None


def pair(seed: int = 1, **options: object) -> tuple[SimNetwork, Pinger, Pinger]:
    network = SimNetwork(seed, **options)  # type: ignore[arg-type]
    a, b = Pinger(B), Pinger()
    network.add(A, ["a:1"], a)
    network.add(B, ["b:1"], b)
    return network, a, b


def test_messages_arrive_after_the_links_latency_and_are_answered() -> None:
    network, a, b = pair(link=Link(latency=(0.1, 0.2)))
    network.run_for(0.5)
    ((at, sender, message),) = b.heard
    assert 0.1 <= at <= 0.2
    assert sender == A
    assert message == Ping(1)
    ((back, _, answer),) = a.heard
    assert 0.2 <= back <= 0.4
    assert answer == Ack(1)
    assert network.now == 0.5


def test_machines_are_woken_exactly_when_they_asked() -> None:
    network, a, _ = pair()
    network.run_for(3.5)
    assert a.ticks == [0.0, 1.0, 2.0, 3.0]


def test_a_message_to_an_address_reaches_whoever_listens_there() -> None:
    network, a, b = pair()
    a.outbox.send_to("b:1", Ping(77))
    a.outbox.send_to("nowhere:1", Ping(78))
    network.run_for(0.5)
    assert Ping(77) in [message for _, _, message in b.heard]
    assert network.counters["absent"] == 1


def test_an_address_belongs_to_the_newest_peer_that_started_there() -> None:
    network, a, b = pair()
    network.crash(B)
    c = Pinger()
    network.add(C, ["b:1"], c)
    a.outbox.send_to("b:1", Ping(77))
    network.run_for(0.5)
    assert [message for _, _, message in c.heard] == [Ping(77)]
    assert b.heard == []


def test_a_message_meant_for_a_dead_peer_never_reaches_its_successor() -> None:
    network, _, _ = pair()
    network.crash(B)
    c = Pinger()
    network.add(C, ["b:1"], c)
    network.run_for(5)
    assert c.heard == []


def test_a_message_to_oneself_is_never_lost() -> None:
    network, a, _ = pair(link=Link(loss=1.0))
    a.outbox.send(A, Ack(9))
    network.run_for(0.5)
    assert [message for _, _, message in a.heard] == [Ack(9)]


def test_loss_takes_its_share() -> None:
    network, _, b = pair(link=Link(loss=0.3))
    network.run_for(1000)
    assert 600 < len(b.heard) < 800
    assert network.counters["lost"] > 200


def test_one_link_can_differ_from_the_others() -> None:
    network, _, b = pair()
    network.links[A, B] = Link(loss=1.0)
    network.run_for(10)
    assert b.heard == []


@pytest.mark.parametrize("one_way", [False, True])
def test_a_partition_blocks_until_it_heals(one_way: bool) -> None:
    network, a, b = pair()
    network.partition([B], [A], one_way=one_way)
    network.run_for(3.5)
    assert len(b.heard) == (4 if one_way else 0)
    assert a.heard == []
    network.heal()
    network.run_for(1)
    assert a.heard


def test_a_paused_peer_does_nothing_and_receives_all_when_resumed() -> None:
    network, a, b = pair()
    network.pause(B)
    network.run_for(2.5)
    assert b.heard == []
    assert network.running() == (A,)
    network.resume(B)
    assert [message for _, _, message in b.heard] == [Ping(1), Ping(2), Ping(3)]
    network.pause(A)
    network.run_for(5)
    assert len(a.ticks) == 3
    network.resume(A)
    assert a.ticks[-1] == network.now == 7.5


def test_run_until_stops_as_soon_as_the_predicate_holds() -> None:
    network, _a, b = pair()
    assert network.run_until(lambda: len(b.heard) == 3, limit=10)
    assert 2 < network.now < 2.1
    assert not network.run_until(lambda: len(b.heard) == 30, limit=10)
    assert 12 < network.now < 12.1


def test_events_are_handed_over_with_their_peer() -> None:
    events: list[tuple[PeerId, Event]] = []
    network, _, _ = pair(on_event=lambda peer, event: events.append((peer, event)))
    network.run_for(0.5)
    assert [peer for peer, _ in events] == [B, A]


def test_a_machine_whose_wakeup_never_moves_ends_the_run() -> None:
    class Stuck(Pinger):
        def next_wakeup(self) -> float | None:
            return 0.0

    network = SimNetwork(1)
    network.add(A, [], Stuck())
    with pytest.raises(RuntimeError, match="for ever"):
        network.run_for(1)


def chatter(seed: int) -> list[tuple[float, PeerId, Message]]:
    network = SimNetwork(seed, link=Link(loss=0.1))
    rng = random.Random(seed)
    ids = [PeerId(f"p{i}") for i in range(10)]
    machines = [Pinger(rng.choice(ids), rng.random() + 0.01) for _ in ids]
    for peer_id, machine in zip(ids, machines, strict=True):
        network.add(peer_id, [f"{peer_id}:1"], machine)
    network.run_for(5)
    return [entry for machine in machines for entry in machine.heard]


def test_a_seed_repeats_a_run_exactly() -> None:
    assert chatter(7) == chatter(7)
    assert chatter(7) != chatter(8)


def test_undecodable_bytes_are_counted_and_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, _, b = pair()
    scramble: Callable[[object], bytes] = lambda envelope: b"\xc1junk"  # noqa: E731
    monkeypatch.setattr("tensorhub_p2p.sim.network.encode", scramble)
    network.run_for(0.5)
    assert b.heard == []
    assert network.counters["garbage"] == 1
