"""Links and weather: latency, loss, copies, order, bandwidth, size, partitions, clogs."""

from __future__ import annotations

import random
import statistics

import pytest
from sim_machines import A, B, C, Pinger, pair

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Ack, Gossip, Ping, VersionHint
from tensorhub_p2p.sim.link import Link, LogNormal, Queues, Uniform
from tensorhub_p2p.sim.network import SimNetwork
from tensorhub_p2p.sim.weather import Effect, all_but, everyone, peers, zones


def send_many(network: SimNetwork, a: Pinger, count: int) -> None:
    """From a to b, all at once."""
    for number in range(1, count + 1):
        a.outbox.send(B, Ping(number))
    network.settle(A)


def quiet_pair(link: Link) -> tuple[SimNetwork, Pinger, Pinger]:
    network, a, b = pair(link=link)
    a.to = None
    network.run_for(0.01)
    return network, a, b


# -- one link --


def test_log_normal_latencies_have_their_median_and_a_tail_that_is_cut() -> None:
    rng, distribution = random.Random(1), LogNormal(0.01, 0.5, longest=0.05)
    draws = [distribution.draw(rng) for _ in range(10_000)]
    assert statistics.median(draws) == pytest.approx(0.01, rel=0.05)
    assert statistics.quantiles(draws, n=100)[98] == pytest.approx(0.032, rel=0.15)
    assert max(draws) == 0.05
    assert distribution.typical == 0.01


def test_a_pair_of_seconds_is_a_uniform_latency() -> None:
    assert Link((0.1, 0.3)).delay == Uniform(0.1, 0.3)
    assert Link(LogNormal(0.1)).delay == LogNormal(0.1)
    assert Link((0.1, 0.3)).delay.typical == pytest.approx(0.2)


def test_a_duplicating_link_delivers_some_messages_twice() -> None:
    network, a, b = quiet_pair(Link(duplicate=0.3))
    send_many(network, a, 1000)
    network.run_for(1)
    assert 1200 < len(b.pings()) < 1400
    assert set(b.pings()) == set(range(1, 1001))


def test_messages_overtake_each_other_unless_the_link_keeps_them_in_order() -> None:
    def order(reorder: float) -> list[int]:
        network, a, b = quiet_pair(Link((0.001, 0.1), reorder=reorder))
        send_many(network, a, 100)
        network.run_for(1)
        return b.pings()

    assert order(0.0) == list(range(1, 101))
    assert order(1.0) != sorted(order(1.0))
    out_of_place = [at for at, ping in enumerate(order(0.1)) if ping != at + 1]
    assert 0 < len(out_of_place) < 100


def test_messages_queue_behind_each_other_for_the_bandwidth() -> None:
    network, a, b = quiet_pair(Link((0.0, 0.0), bandwidth=1000.0))
    start, before = network.now, network.counters["bytes"]
    send_many(network, a, 10)
    size = (network.counters["bytes"] - before) / 10
    network.run_for(5)
    arrivals = [at - start for at, _, _ in b.heard]
    assert arrivals == pytest.approx([size * i / 1000 for i in range(1, 11)], rel=0.01)


def test_messages_larger_than_the_link_takes_are_dropped_and_counted() -> None:
    network, a, b = quiet_pair(Link(max_bytes=200))
    a.outbox.send(B, Gossip(hints=(VersionHint("m" * 255, 0, 1),)))
    a.outbox.send(B, Ping(1))
    network.run_for(1)
    assert b.pings() == [1]
    assert network.counters["oversized"] == 1


def test_waiting_lines_of_idle_links_are_forgotten() -> None:
    queues = Queues()
    for number in range(20_000):
        link = (PeerId(f"p{number}"), B)
        assert queues.next_free(link, now=float(number)) == number
        queues.occupy(link, until=number + 10.0, now=float(number))
    assert len(queues) < 5000


# -- which link --


def test_the_link_of_a_pair_goes_before_its_zones_and_these_before_the_default() -> None:
    network = SimNetwork(1, link=Link((0.1, 0.1)))
    pingers = {}
    for name, zone in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "z")):
        pingers[name] = Pinger()
        network.add(PeerId(name), [f"{name}:1"], pingers[name], zone)
    network.link_table.between_zones = Link((0.3, 0.3))
    network.link_table.set_zones("x", "y", Link((0.2, 0.2)))
    network.links[A, PeerId("d")] = Link((0.4, 0.4))
    for to in "bcd":
        pingers["a"].outbox.send(PeerId(to), Ack(1))
    pingers["b"].outbox.send(PeerId("d"), Ack(2))
    pingers["c"].outbox.send(A, Ack(3))
    network.run_for(1)
    at = {name: [time for time, _, _ in pinger.heard] for name, pinger in pingers.items()}
    assert at == {"a": [0.2], "b": [0.1], "c": [0.2], "d": [0.3, 0.4]}


# -- weather --


def three(seed: int = 1) -> tuple[SimNetwork, dict[str, Pinger]]:
    """a pings b, b pings c, c pings a; a is in zone x, b and c in y."""
    network = SimNetwork(seed)
    pingers = {"a": Pinger(B), "b": Pinger(C), "c": Pinger(A)}
    for name, pinger in pingers.items():
        network.add(PeerId(name), [f"{name}:1"], pinger, "x" if name == "a" else "y")
    return network, pingers


def heard(pingers: dict[str, Pinger]) -> dict[str, list[int]]:
    return {name: pinger.pings() for name, pinger in pingers.items()}


def test_zones_are_parted_and_those_who_come_later_too() -> None:
    network, pingers = three()
    cut = network.partition(zones(["x"]), zones(["y"]))
    late = Pinger(A)
    network.add(PeerId("late"), ["late:1"], late, "y")
    network.run_for(1.5)
    assert heard(pingers) == {"a": [], "b": [], "c": [1, 2]}
    network.lift(cut)
    network.run_for(1)
    assert heard(pingers) == {"a": [3, 3], "b": [3], "c": [1, 2, 3]}
    assert network.counters["blocked"] == 6


def test_partitions_overlap_and_end_one_by_one() -> None:
    network, pingers = three()
    first = network.partition([A], everyone, one_way=True)
    second = network.partition(all_but(peers([B])), peers([B]))
    network.run_for(0.5)
    assert heard(pingers) == {"a": [1], "b": [], "c": []}
    network.lift(first)
    network.lift(first)
    network.run_for(1)
    assert heard(pingers) == {"a": [1, 2], "b": [], "c": []}
    network.lift(second)
    network.run_for(1)
    assert heard(pingers) == {"a": [1, 2, 3], "b": [3], "c": [3]}
    assert not network.weather


def test_a_clog_holds_messages_and_then_lets_them_through_in_order() -> None:
    network, a, b = quiet_pair(Link((0.001, 0.1)))
    clog = network.clog([A], [B])
    send_many(network, a, 50)
    network.run_for(10)
    assert b.heard == []
    network.lift(clog)
    network.run_for(0.2)
    assert b.pings() == list(range(1, 51))


def test_what_a_clog_held_is_lost_if_a_partition_lies_there_by_then() -> None:
    network, a, b = quiet_pair(Link())
    clog = network.clog([A], [B])
    send_many(network, a, 5)
    network.partition([A], [B])
    network.lift(clog)
    network.run_for(1)
    assert b.heard == []
    assert network.counters["blocked"] == 5


def test_a_burst_loses_copies_and_delays_while_it_lasts() -> None:
    network, a, b = quiet_pair(Link((0.0, 0.0)))
    burst = network.disturb([A], [B], Effect(loss=0.5, duplicate=0.5, delay=1.0), one_way=True)
    send_many(network, a, 1000)
    network.run_for(0.9)
    assert b.heard == []
    network.run_for(0.2)
    assert 400 < len(set(b.pings())) < 600
    assert 1.3 < len(b.pings()) / len(set(b.pings())) < 1.7
    network.lift(burst)
    before = len(b.pings())
    send_many(network, a, 100)
    network.run_for(0.1)
    assert len(b.pings()) == before + 100
