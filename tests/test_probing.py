"""Who is probed, how, and what counts as an answer. Driven without the rest of membership."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.config import WIDE_AREA, SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.membership.health import LocalHealth
from tensorhub_p2p.protocol.membership.members import Members, MemberView
from tensorhub_p2p.protocol.membership.probing import (
    MAX_URGENT,
    ProbeOrder,
    Prober,
    Silence,
)
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.protocol.messages import Ack, Message, Nack, Ping, PingRequest, Status

CONFIG = SwimConfig()
SICK, ANN, BOB, CID, DAN = (PeerId(name) for name in ("sick", "ann", "bob", "cid", "dan"))
EVERYBODY = (SICK, ANN, BOB, CID, DAN)


def put(members: Members, *peers: PeerId, status: Status = Status.ALIVE) -> None:
    for peer in peers:
        members.put(MemberView(PeerInfo(peer, peer, "here", (f"{peer}:1",)), 0, status, 0.0))


def seq(message: Message) -> int:
    assert isinstance(message, (Ping, PingRequest))
    return message.seq


class Bench:
    """A prober with its members; time is whatever the test says."""

    def __init__(self, *peers: PeerId, seed: int = 1, config: SwimConfig = CONFIG) -> None:
        self.members = Members(1000)
        put(self.members, *peers)
        self.health = LocalHealth(config.max_local_health)
        self.prober = Prober(config, random.Random(seed), self.members, self.health)

    def sent(self) -> list[tuple[PeerId, Message]]:
        sends, self.prober.sends = self.prober.sends, []
        return sends

    def looked_at(self) -> list[PeerId]:
        looks, self.prober.looks = self.prober.looks, []
        return looks

    def probe(self, now: float = 0.0) -> int:
        """An urgent probe of SICK begins; its number."""
        self.prober.probe_now(now, SICK)
        sent = self.sent()
        (ping,) = [m for to, m in sent if to == SICK and isinstance(m, Ping)]
        self.asked = [to for to, m in sent if isinstance(m, PingRequest)]
        return ping.seq

    def silences(self, now: float) -> list[Silence]:
        return [silence for silence in self.prober.tick(now) if silence.target == SICK]


# -- whose turn it is --


@given(st.integers(1, 30), st.integers(0, 1000))
def test_every_member_is_probed_once_a_round(size: int, seed: int) -> None:
    members = Members(1000)
    peers = [PeerId(f"p{number}") for number in range(size)]
    put(members, *peers)
    order = ProbeOrder(random.Random(seed))
    order.fill(members)
    for _ in range(3):
        assert sorted(order.next(members) or "" for _ in peers) == sorted(peers)


@given(st.integers(2, 20), st.integers(0, 1000), st.integers(0, 30))
def test_a_newcomer_is_probed_within_two_rounds(size: int, seed: int, before: int) -> None:
    members = Members(1000)
    put(members, *(PeerId(f"p{number}") for number in range(size)))
    order = ProbeOrder(random.Random(seed))
    order.fill(members)
    for _ in range(before):
        order.next(members)
    put(members, SICK)
    order.insert(SICK, members)
    assert SICK in [order.next(members) for _ in range(2 * (size + 1))]


def test_rounds_are_shuffled_anew() -> None:
    members = Members(1000)
    put(members, *(PeerId(f"p{number}") for number in range(20)))
    order = ProbeOrder(random.Random(1))
    order.fill(members)
    assert [order.next(members) for _ in range(20)] != [order.next(members) for _ in range(20)]


def test_the_dead_are_passed_over_and_nobody_is_probed_if_there_is_nobody() -> None:
    members = Members(1000)
    put(members, ANN, BOB)
    order = ProbeOrder(random.Random(1))
    order.fill(members)
    put(members, BOB, status=Status.DEAD)
    assert {order.next(members) for _ in range(5)} == {ANN}
    put(members, ANN, status=Status.LEFT)
    assert order.next(members) is None


def test_one_that_comes_and_goes_is_not_probed_more_than_others() -> None:
    members = Members(1000)
    put(members, ANN, BOB, CID)
    order = ProbeOrder(random.Random(1))
    order.fill(members)
    for _ in range(1000):
        order.insert(ANN, members)
    assert len(order._order) < 200
    turns = Counter(order.next(members) for _ in range(200 + 300))
    assert turns[BOB] > 50


def test_a_member_is_probed_each_interval() -> None:
    bench = Bench()
    bench.prober.start(0.0)
    put(bench.members, *EVERYBODY)
    bench.prober.adopt(0.0)
    times = []
    for step in range(60):
        bench.prober.tick(step * 0.1)
        for to, message in bench.sent():
            if isinstance(message, Ping):
                times.append(step * 0.1)
                bench.prober.acked(to, Ack(message.seq))
    assert len(times) in (5, 6)
    assert times[0] <= CONFIG.probe_interval


# -- the course of a probe --


def test_relays_are_asked_when_the_target_did_not_answer_in_time() -> None:
    bench = Bench(SICK)
    bench.prober.adopt(0.0)
    start = bench.prober.next_wakeup()
    assert start is not None
    put(bench.members, ANN, BOB, CID, DAN)
    bench.prober.tick(start)
    ((to, ping),) = bench.sent()
    assert to == SICK
    assert bench.looked_at() == []
    bench.prober.tick(start + 0.49)
    assert bench.sent() == []
    bench.prober.tick(start + 0.5)
    requests = bench.sent()
    assert len({to for to, _ in requests}) == CONFIG.indirect_probes
    assert all(message == PingRequest(seq(ping), SICK) for _, message in requests)
    assert SICK not in [to for to, _ in requests]
    assert bench.looked_at() == [SICK]
    assert bench.prober.tick(start + 0.99) == []
    assert [s.target for s in bench.prober.tick(start + 1.0)] == [SICK]


def test_with_few_members_all_others_are_asked() -> None:
    bench = Bench(SICK, ANN)
    bench.probe()
    assert bench.asked == [ANN]


def test_an_answer_of_the_target_or_of_an_asked_relay_ends_the_probe() -> None:
    for answers in ("target", "relay"):
        bench = Bench(*EVERYBODY)
        number = bench.probe()
        assert bench.prober.acked(SICK if answers == "target" else bench.asked[0], Ack(number))
        assert bench.silences(10.0) == []


def test_nobody_else_can_answer_and_no_other_number_counts() -> None:
    bench = Bench(*EVERYBODY)
    number = bench.probe()
    (other,) = {ANN, BOB, CID, DAN} - set(bench.asked)
    assert not bench.prober.acked(other, Ack(number))
    assert not bench.prober.acked(SICK, Ack(number + 1))
    assert len(bench.silences(1.0)) == 1


def test_what_was_heard_meanwhile_is_reported_with_the_silence() -> None:
    bench = Bench(*EVERYBODY)
    bench.prober.heard(SICK)  # before: says nothing
    bench.probe()
    assert [(s.heard_target, s.heard_anybody) for s in bench.silences(1)] == [(False, False)]
    bench.health.score = 0
    bench.probe(2.0)
    bench.prober.heard(ANN)
    assert [(s.heard_target, s.heard_anybody) for s in bench.silences(3)] == [(False, True)]
    bench.health.score = 0
    bench.probe(4.0)
    bench.prober.heard(SICK)
    assert [(s.heard_target, s.heard_anybody) for s in bench.silences(5)] == [(True, True)]


def test_what_the_sockets_showed_last_is_the_finding() -> None:
    bench = Bench(*EVERYBODY)
    bench.prober.found(SICK, Evidence.GREETED)  # before: forgotten
    bench.probe()
    bench.prober.found(ANN, Evidence.GREETED)
    assert [s.finding for s in bench.silences(1)] == [None]
    bench.health.score = 0
    bench.probe(2.0)
    bench.prober.found(SICK, Evidence.GREETED)
    bench.prober.found(SICK, Evidence.REFUSED)
    assert [s.finding for s in bench.silences(3)] == [Evidence.REFUSED]


def test_who_was_heard_of_to_be_well_needs_no_further_probe() -> None:
    bench = Bench(*EVERYBODY)
    bench.probe()
    bench.prober.absolve(SICK)
    assert bench.silences(1.0) == []


# -- urgent probes --


def test_an_urgent_probe_uses_all_means_at_once() -> None:
    bench = Bench(*EVERYBODY)
    bench.probe()
    assert len(bench.asked) == CONFIG.indirect_probes
    assert bench.looked_at() == [SICK]


def test_urgency_hurries_a_probe_that_is_under_way_and_starts_no_second() -> None:
    bench = Bench(SICK)
    bench.prober.adopt(0.0)
    put(bench.members, ANN, BOB, CID)
    start = bench.prober.next_wakeup()
    assert start is not None
    bench.prober.tick(start)
    assert [type(m) for _, m in bench.sent()] == [Ping]
    bench.prober.probe_now(start + 0.1, SICK)
    assert [type(m) for _, m in bench.sent()] == [PingRequest] * 3
    bench.prober.probe_now(start + 0.2, SICK)
    assert bench.sent() == []
    assert [s.target for s in bench.prober.tick(start + 1.0)] == [SICK]
    assert bench.prober.tick(start + 1.2) == []


def test_urgent_probes_are_bounded() -> None:
    many = [PeerId(f"p{number}") for number in range(100)]
    bench = Bench(*many)
    for peer in many:
        bench.prober.probe_now(0.0, peer)
    assert sum(isinstance(message, Ping) for _, message in bench.sent()) == MAX_URGENT + 1


# -- local health --


def test_relays_that_report_the_silence_are_no_sign_of_ill_health() -> None:
    bench = Bench(*EVERYBODY)
    number = bench.probe()
    for relay in bench.asked:
        assert bench.prober.nacked(relay, Nack(number))
    assert len(bench.silences(1.0)) == 1
    assert bench.health.score == 0


@pytest.mark.parametrize("nacks", [0, 1, 2, 3])
def test_each_relay_that_is_silent_too_is_one(nacks: int) -> None:
    bench = Bench(*EVERYBODY)
    number = bench.probe()
    for relay in bench.asked[:nacks]:
        bench.prober.nacked(relay, Nack(number))
        bench.prober.nacked(relay, Nack(number))  # twice says no more
    bench.silences(1.0)
    assert bench.health.score == 3 - nacks


def test_a_nack_counts_only_of_those_asked() -> None:
    bench = Bench(*EVERYBODY)
    number = bench.probe()
    (other,) = {ANN, BOB, CID, DAN} - set(bench.asked)
    assert not bench.prober.nacked(other, Nack(number))
    assert not bench.prober.nacked(SICK, Nack(number))
    assert not bench.prober.nacked(bench.asked[0], Nack(number + 1))
    bench.silences(1.0)
    assert bench.health.score == 3


def test_a_silence_that_nobody_can_explain_is_one_bad_sign() -> None:
    bench = Bench(SICK)
    bench.probe()
    bench.silences(1.0)
    assert bench.health.score == 1


def test_an_answer_is_a_good_sign() -> None:
    bench = Bench(*EVERYBODY)
    bench.health.note(5)
    bench.prober.acked(SICK, Ack(bench.probe()))
    assert bench.health.score == 4


@pytest.mark.parametrize("score", [0, 1, 4, 100])
def test_all_times_of_a_probe_are_stretched_by_ill_health_up_to_the_limit(score: int) -> None:
    bench = Bench(SICK)
    bench.health.note(score)
    stretch = min(1 + score, CONFIG.max_local_health)
    bench.prober.adopt(0.0)
    put(bench.members, ANN)
    start = bench.prober.next_wakeup()
    assert start is not None
    bench.prober.tick(start)
    assert bench.prober.next_wakeup() == start + CONFIG.probe_timeout * stretch
    bench.prober.tick(start + CONFIG.probe_timeout * stretch)
    assert bench.prober.next_wakeup() == start + CONFIG.probe_interval * stretch
    assert bench.prober.tick(start + CONFIG.probe_interval * stretch - 0.01) == []
    assert len(bench.prober.tick(start + CONFIG.probe_interval * stretch)) == 1


# -- own pauses --


def test_after_a_pause_probes_begin_anew_and_what_others_asked_is_too_old() -> None:
    bench = Bench(*EVERYBODY)
    number = bench.probe()
    bench.prober.asked(0.0, ANN, PingRequest(7, BOB))
    bench.sent()
    bench.prober.restart(5.0)
    ((to, ping),) = bench.sent()
    assert (to, type(ping)) == (SICK, Ping)
    assert not bench.prober.acked(SICK, Ack(number)), "what it answers now counts"
    assert bench.silences(5.9) == []
    assert not [m for _, m in bench.sent() if isinstance(m, Nack)]
    assert len(bench.silences(6.0)) == 1


# -- for others --


def test_a_ping_is_answered_under_its_number() -> None:
    bench = Bench()
    bench.prober.pinged(ANN, Ping(77))
    assert bench.sent() == [(ANN, Ack(77))]


def test_a_relay_pings_under_a_number_of_its_own_and_passes_the_answer_on() -> None:
    bench = Bench(*EVERYBODY)
    bench.probe()
    for requester in (ANN, BOB):
        assert bench.prober.asked(0.0, requester, PingRequest(7, SICK))
    (_, first), (_, second) = bench.sent()
    assert seq(first) != seq(second)
    assert bench.prober.acked(SICK, Ack(seq(second)))
    assert bench.sent() == [(BOB, Ack(7))]
    assert not bench.prober.acked(ANN, Ack(seq(first))), "nobody answers for another"


def test_a_relay_says_in_time_that_it_got_no_answer_and_passes_on_a_late_one() -> None:
    bench = Bench(*EVERYBODY)
    bench.prober.asked(0.0, ANN, PingRequest(7, SICK))
    ((_, ping),) = bench.sent()
    bench.prober.tick(0.4)
    assert bench.sent() == [(ANN, Nack(7))]
    bench.prober.tick(0.9)
    assert bench.sent() == [], "once"
    assert bench.prober.acked(SICK, Ack(seq(ping)))
    assert bench.sent() == [(ANN, Ack(7))]
    assert not bench.prober.acked(SICK, Ack(seq(ping)))


def test_what_is_relayed_is_forgotten_after_an_interval() -> None:
    bench = Bench(*EVERYBODY)
    bench.prober.asked(0.0, ANN, PingRequest(7, SICK))
    ((_, ping),) = bench.sent()
    bench.prober.tick(CONFIG.probe_interval)
    bench.sent()
    assert not bench.prober.acked(SICK, Ack(seq(ping)))
    assert bench.prober._relayed == {}


@pytest.mark.parametrize("config", [CONFIG, WIDE_AREA])
def test_a_nack_arrives_before_the_asker_judges(config: SwimConfig) -> None:
    """Though the question and the Nack each take a fiftieth of the interval."""
    way = config.probe_interval / 50
    bench = Bench(*EVERYBODY, config=config)
    bench.prober.asked(config.probe_timeout + way, ANN, PingRequest(7, SICK))
    bench.sent()
    bench.prober.tick(config.probe_interval - way)
    assert bench.sent() == [(ANN, Nack(7))]


def test_nothing_is_due_while_nobody_is_there() -> None:
    bench = Bench()
    assert bench.prober.next_wakeup() is None
    bench.prober.start(0.0)
    assert bench.prober.next_wakeup() is None
