"""Membership against what no honest peer sends: dropped, counted, and forgotten.

Whatever arrives, a machine raises nothing, changes nothing that the sender may not change, and
keeps no more than its bounds allow. Growth is measured by walking all that a machine refers
to (`weight`), so that no table is left out.
"""

from __future__ import annotations

import random
from itertools import count

import msgspec
import pytest
from fuzz_membership import fuzz, weight
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_p2p.config import Config, SwimConfig
from tensorhub_p2p.protocol.envelope import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Envelope,
    Undecodable,
    encode,
    open_envelope,
    pack,
    unpack,
)
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event, Send
from tensorhub_p2p.protocol.membership.members import PARTS
from tensorhub_p2p.protocol.membership.opinions import MAX_INCARNATION
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.protocol.messages import (
    Ack,
    Gossip,
    Message,
    Nack,
    Ping,
    PingRequest,
    PushPull,
    PushPullReply,
    Rumour,
    Status,
    VersionHint,
    ViewDigest,
    WideArea,
    ZoneGreeting,
    ZoneSummary,
)
from tensorhub_p2p.protocol.zones.wide_area import unwrap, wrap
from tensorhub_p2p.protocol.zones.zones import Zones

ME, FRIEND, OTHER, STRANGER = (PeerId(name) for name in ("me", "friend", "other", "stranger"))
ALIVE, SUSPECT, UNRESPONSIVE, DEAD, LEFT = Status


def info(peer: str) -> PeerInfo:
    return PeerInfo(PeerId(peer), peer, "here", (f"{peer}:1",))


def alive(peer: str, incarnation: int = 0) -> Rumour:
    return Rumour(PeerId(peer), incarnation, ALIVE, info(peer))


def swim(config: SwimConfig | None = None) -> Swim:
    machine = Swim(info(ME), config or SwimConfig(), random.Random(1))
    machine.join(0.0, ["seed:1"])
    view = (alive(FRIEND), alive(OTHER))
    machine.receive(0.0, FRIEND, PushPullReply(info(FRIEND), view, dialled="seed:1"))
    machine.outbox.drain()
    return machine


def holds(machine: Swim) -> list[tuple[PeerId, int, Status, PeerInfo]]:
    """What must not change: all that it believes, of itself too."""
    return [(v.peer_id, v.incarnation, v.status, v.info) for v in machine.members()]


def arrives(machine: Swim, sender: PeerId, kind: str, body: bytes, now: float = 0.0) -> bool:
    """As from the wire; False if it never gets as far as the machine."""
    raw = msgspec.Raw(body)
    try:
        message = unpack(Envelope(WIRE_VERSION, "", "", sender, "", ME, kind, raw))
    except Undecodable:
        return False
    machine.receive(now, sender, message)
    return True


EXAMPLES: tuple[Message, ...] = (
    Ping(7),
    PingRequest(7, OTHER),
    Ack(7),
    Nack(7),
    Gossip(),
    ViewDigest((0,) * PARTS),
    PushPull(info(FRIEND), (alive(FRIEND), Rumour(OTHER, 0, ALIVE))),
    PushPullReply(info(FRIEND), (alive(FRIEND),), hello=True),
    WideArea("Ping", b"\x91\x07"),
    ZoneGreeting(info(STRANGER), (ZoneSummary("there", 3, (info(STRANGER),)),)),
)


# -- bytes that are no message --


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_truncated_message_is_no_message(message: Message) -> None:
    kind, body = pack(message)
    envelope = Envelope(WIRE_VERSION, "run", "here", FRIEND, "friend:1", ME, kind, body)
    data = encode(envelope)
    for cut in range(len(data)):
        with pytest.raises(Undecodable):
            unpack(open_envelope(data[:cut]))
    for cut in range(len(bytes(body))):
        with pytest.raises(Undecodable):
            unpack(msgspec.structs.replace(envelope, body=msgspec.Raw(bytes(body)[:cut])))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([type(m).__name__ for m in EXAMPLES]))
def test_garbage_changes_nothing(garbage: bytes, kind: str) -> None:
    with pytest.raises(Undecodable):
        open_envelope(b"\xc1" + garbage)
    machine = swim()
    before = holds(machine), weight(machine)
    if not arrives(machine, FRIEND, kind, garbage):
        assert (holds(machine), weight(machine)) == before


def test_lengths_that_are_lies_cost_no_memory() -> None:
    for kind in ("Gossip", "ViewDigest", "PushPull", "WideArea"):
        for length in (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
            assert not arrives(swim(), FRIEND, kind, b"\x92\xa1a" + length)
            assert not arrives(swim(), FRIEND, kind, length)


def test_what_nests_without_end_is_no_message() -> None:
    for kind in ("Gossip", "PushPull", "ZoneGreeting"):
        assert not arrives(swim(), FRIEND, kind, b"\x91" * 500_000)
    with pytest.raises(Undecodable):
        open_envelope(b"\x98" + b"\x91" * 500_000)


def test_an_oversized_message_is_not_looked_at() -> None:
    with pytest.raises(Undecodable, match="limit"):
        open_envelope(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("label", [type(m).__name__ for m in EXAMPLES])
@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_wrong_label_changes_nothing(message: Message, label: str) -> None:
    kind, body = pack(message)
    machine = swim()
    before = holds(machine)
    arrives(machine, FRIEND, label, bytes(body))
    machine.tick(0.01)
    assert holds(machine) == before
    assert label == kind or weight(machine) < weight(swim()) + 60


def test_a_status_that_nobody_knows_is_no_message() -> None:
    body = msgspec.msgpack.encode([[[OTHER, 0, 5]]])
    assert not arrives(swim(), FRIEND, "Gossip", body)


@pytest.mark.parametrize("message", [*EXAMPLES[8:]], ids=lambda message: type(message).__name__)
def test_what_is_between_zones_is_not_for_one_pool(message: Message) -> None:
    machine = swim()
    machine.receive(0.0, FRIEND, message)
    assert machine.outbox.drain() == []


# -- claims that nobody may make --


@pytest.mark.parametrize("peer", [ME, OTHER, STRANGER])
@pytest.mark.parametrize("incarnation", [MAX_INCARNATION + 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("status", Status)
def test_an_absurd_incarnation_is_dropped_and_counted(
    peer: PeerId, incarnation: int, status: Status
) -> None:
    machine = swim()
    before = holds(machine), machine._opinions.incarnation
    claim = Rumour(peer, incarnation, status, info(peer), FRIEND)
    for message in (Gossip((claim,)), Ping(1, (claim,)), PushPull(info(FRIEND), (claim,))):
        machine.receive(0.0, FRIEND, message)
    assert (holds(machine), machine._opinions.incarnation) == before
    assert machine.dropped["malformed rumour"] == 3


def test_nobody_is_no_member() -> None:
    machine = swim()
    machine.receive(0.0, FRIEND, Gossip((Rumour(NOBODY, 0, ALIVE, info(NOBODY)),)))
    machine.receive(0.0, NOBODY, PushPull(info(NOBODY), (alive(NOBODY),), joining=True))
    assert machine.status(NOBODY) is None


@pytest.mark.parametrize("status", Status)
def test_a_name_of_any_length_is_no_name(status: Status) -> None:
    machine = swim()
    long = PeerId("x" * 65)
    before = holds(machine), weight(machine)
    machine.receive(0.0, FRIEND, Gossip((Rumour(long, 0, status, info(long)),)))
    machine.receive(0.0, FRIEND, Gossip((Rumour(OTHER, 5, status, None, long),)))
    machine.outbox.drain()
    assert holds(machine) == before[0]
    assert machine.status(long) is None
    assert machine.dropped["malformed rumour"] == 2


def test_who_tells_too_much_about_itself_is_no_member() -> None:
    machine = swim()
    for told in (
        PeerInfo(STRANGER, "x" * 5000, "here", ("stranger:1",)),
        PeerInfo(STRANGER, "x", "here", ("stranger:1",) * 500),
        PeerInfo(STRANGER, "x", "here", ("stranger:1",), (), "x" * 5000),
    ):
        claim = Rumour(STRANGER, 0, ALIVE, told)
        machine.receive(0.0, STRANGER, PushPull(told, (claim,), joining=True))
    assert machine.status(STRANGER) is None
    assert machine.dropped["introduction too large"] == 3


def test_a_claim_of_a_peer_under_anothers_introduction_is_dropped_and_counted() -> None:
    machine = swim()
    before = holds(machine)
    for status in Status:
        machine.receive(0.0, FRIEND, Gossip((Rumour(STRANGER, 0, status, info("heir")),)))
        machine.receive(0.0, FRIEND, Gossip((Rumour(OTHER, 0, status, info("heir")),)))
    assert holds(machine) == before
    assert machine.dropped["malformed rumour"] == 2 * len(Status)


def test_what_a_member_told_of_itself_is_never_replaced() -> None:
    machine = swim()
    moved = PeerInfo(OTHER, "other", "there", ("evil:1",))
    machine.receive(0.0, FRIEND, Gossip((Rumour(OTHER, 5, ALIVE, moved),)))
    machine.receive(0.0, OTHER, PushPull(moved, (Rumour(OTHER, 6, ALIVE, moved),), joining=True))
    assert machine.info(OTHER) == info(OTHER)


def test_rumours_of_unknown_peers_without_introduction_change_nothing() -> None:
    machine = swim()
    before = holds(machine), weight(machine)
    for number in range(100):
        claims = [Rumour(PeerId(f"{number}"), 0, s, None, FRIEND) for s in Status if s < DEAD]
        machine.receive(0.0, FRIEND, Gossip(tuple(claims)))
    machine.outbox.drain()
    assert (holds(machine), weight(machine)) == before


def test_a_view_that_speaks_for_somebody_else_is_dropped_and_counted() -> None:
    machine = swim()
    before = holds(machine)
    for kind in (PushPull, PushPullReply):
        machine.receive(0.0, STRANGER, kind(info(OTHER), (alive(STRANGER), Rumour(OTHER, 9, DEAD))))
    machine.receive(0.0, ME, PushPullReply(info(ME), (Rumour(OTHER, 9, DEAD),)))
    assert holds(machine) == before
    assert machine.dropped["forged view"] == 3


def test_a_message_in_the_own_name_changes_nothing() -> None:
    machine = swim()
    before = holds(machine)
    machine.receive(0.0, ME, PushPull(info(ME), (alive(STRANGER), Rumour(OTHER, 9, DEAD))))
    machine.receive(0.0, ME, Ack(1))
    machine.tick(0.01)
    assert holds(machine) == before


# -- answers to nothing --


def test_acks_and_nacks_nobody_asked_for_change_nothing_and_are_counted() -> None:
    machine = swim()
    machine.tick(1.0)
    probe = next(
        item.message.seq
        for item in machine.outbox.drain()
        if isinstance(item, Send) and isinstance(item.message, Ping)
    )
    machine._health.note(3)
    for seq in (0, probe + 1, 2**64 - 1):
        machine.receive(1.0, FRIEND, Ack(seq))
        machine.receive(1.0, FRIEND, Nack(seq))
    machine.receive(1.0, STRANGER, Ack(probe))
    machine.receive(1.0, STRANGER, Nack(probe))
    assert machine._health.score == 3, "only an answer to the own question is a sign of health"
    assert list(machine._prober._probes) == [probe], "it still waits for its target"
    assert machine.dropped["ack nobody waits for"] == 4
    assert machine.dropped["nack nobody waits for"] == 4


def test_a_digest_of_the_wrong_length_is_dropped_and_counted() -> None:
    machine = swim()
    for parts in ((), (1,) * (PARTS - 1), (1,) * (PARTS + 1), (1,) * 10_000):
        machine.receive(0.0, FRIEND, ViewDigest(parts))
        machine.tick(1.0)
        sent = [type(i.message) for i in machine.outbox.drain() if isinstance(i, Send)]
        assert PushPull not in sent
    assert machine.dropped["view digest malformed or too often"] == 4


def test_digests_in_a_storm_are_answered_a_few_times_and_counted() -> None:
    machine = swim()
    for _ in range(100):
        machine.receive(0.0, FRIEND, ViewDigest((1,) * PARTS))
    sent = [i for i in machine.outbox.drain() if isinstance(i, Send)]
    assert sum(isinstance(item.message, PushPull) for item in sent) <= 4
    assert machine.dropped["view digest malformed or too often"] >= 96


@pytest.mark.parametrize("kind", [PushPull, PushPullReply])
@pytest.mark.parametrize("parts", [(PARTS,), (2**63,), (1,) * (PARTS + 1), (0, PARTS + 5)])
def test_parts_that_no_view_has_are_dropped_and_counted(
    kind: type[PushPull] | type[PushPullReply], parts: tuple[int, ...]
) -> None:
    machine = swim()
    before = holds(machine)
    machine.receive(0.0, FRIEND, kind(info(FRIEND), (alive(STRANGER),), parts=parts))
    assert holds(machine) == before
    assert not [i for i in machine.outbox.drain() if isinstance(i, Send)]
    assert machine.dropped["forged view"] == 1


# -- replays --


def test_replays_of_all_that_was_ever_said_change_nothing() -> None:
    """Three peers talk; later everything is said again to one of them, out of order."""
    machines = {peer: Swim(info(peer), SwimConfig(), random.Random(peer)) for peer in "abc"}
    said: list[tuple[PeerId, Message]] = []
    for peer, machine in machines.items():
        machine.join(0.0, ["a:1"])
        deliver(machines, peer, 0.0, said)
    now = 0.0
    for step in count():
        now = min(w for m in machines.values() if (w := m.next_wakeup()) is not None)
        if now > 20:
            break
        if step == 50:
            claims = (Rumour(PeerId("b"), 0, SUSPECT), Rumour(PeerId("c"), 0, DEAD))
            machines["a"].receive(now, PeerId("c"), Gossip(claims))
        for peer, machine in machines.items():
            machine.tick(now)
            deliver(machines, peer, now, said)
    target = machines["a"]
    before = holds(target), target._opinions.incarnation
    size = weight(target)
    assert len(said) > 50
    for seed in range(3):
        random.Random(seed).shuffle(said)
        for sender, message in said:
            target.receive(now, sender, message)
    target.outbox.drain()
    assert (holds(target), target._opinions.incarnation) == before
    assert weight(target) < size + 2 * target._config.max_relayed_probes * 10


def deliver(
    machines: dict[str, Swim], peer: str, now: float, said: list[tuple[PeerId, Message]]
) -> None:
    """Everything that waits in a peer's outbox, and what follows; remembers what went to "a"."""
    waiting = [(PeerId(peer), item) for item in machines[peer].outbox.drain()]
    while waiting:
        sender, item = waiting.pop(0)
        if isinstance(item, Event):
            continue
        to = item.to if isinstance(item, Send) else item.address.split(":")[0]
        if to == "a":
            said.append((sender, item.message))
        machines[to].receive(now, sender, item.message)
        waiting += [(PeerId(to), each) for each in machines[to].outbox.drain()]


# -- floods --

SMALL = SwimConfig(max_members=20, max_hinted_models=20, max_zones=20, max_relayed_probes=20)


def flood(machine: Swim, kind: str, number: int) -> None:
    """One more of those messages."""
    new = f"new-{number}"
    now = number * 1e-6
    match kind:
        case "newcomers":
            machine.receive(now, FRIEND, Gossip((alive(new),)))
        case "newcomers that die":
            death = Rumour(PeerId(new), 0, DEAD)
            machine.receive(now, FRIEND, Gossip((alive(new), death)))
        case "newcomers that leave":
            machine.receive(now, FRIEND, Gossip((alive(new), Rumour(PeerId(new), 0, LEFT))))
        case "deaths of strangers":
            machine.receive(now, FRIEND, Gossip((Rumour(PeerId(new), number, DEAD),)))
        case "a view":
            machine.receive(now, FRIEND, PushPull(info(FRIEND), tuple(map(alive, ("x", new)))))
        case "joins":
            machine.receive(now, PeerId(new), PushPull(info(new), (alive(new),), joining=True))
        case "suspicions":
            claim = Rumour(OTHER, number, SUSPECT, None, PeerId(new))
            machine.receive(now, FRIEND, Gossip((claim,)))
        case "accusers":
            machine.receive(now, FRIEND, Gossip((Rumour(OTHER, 0, SUSPECT, None, PeerId(new)),)))
        case "unresponsive":
            machine.receive(now, FRIEND, Gossip((Rumour(OTHER, number, UNRESPONSIVE),)))
        case "refutations":
            machine.receive(now, FRIEND, Gossip((Rumour(ME, number, SUSPECT),)))
        case "pings by strangers":
            machine.receive(now, PeerId(new), Ping(number))
        case "ping requests":
            machine.receive(now, FRIEND, PingRequest(number, PeerId(new)))
        case "acks":
            machine.receive(now, FRIEND, Ack(number + 1000, (), number))
        case "nacks":
            machine.receive(now, FRIEND, Nack(number))
        case "hints":
            machine.receive(now, FRIEND, Gossip(hints=(VersionHint(new, 0, number),)))
        case "summaries":
            summary = ZoneSummary(new, number, (info(new),))
            machine.receive(now, FRIEND, Gossip(summaries=(summary,)))
        case "digests":
            machine.receive(now, FRIEND, ViewDigest((number,) * PARTS))
        case "replies":
            view = (alive(new), Rumour(OTHER, number, DEAD))
            machine.receive(now, FRIEND, PushPullReply(info(FRIEND), view, dialled=new))
        case "own echoes":
            machine.receive(now, ME, PushPull(info(ME), (), dialled=new))
        case "evidence":
            which = (Evidence.REFUSED, Evidence.GREETED, Evidence.DISCONNECTED)[number % 3]
            machine.evidence(now, (OTHER, PeerId(new))[number % 2], which)
        case _:
            raise AssertionError(kind)


FLOODS = (
    "newcomers",
    "newcomers that die",
    "newcomers that leave",
    "deaths of strangers",
    "a view",
    "joins",
    "suspicions",
    "accusers",
    "unresponsive",
    "refutations",
    "pings by strangers",
    "ping requests",
    "acks",
    "nacks",
    "hints",
    "summaries",
    "digests",
    "replies",
    "own echoes",
    "evidence",
)


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_makes_nothing_grow_beyond_its_bounds(kind: str) -> None:
    """Twice as much of it, while no time passes, weighs no more."""
    machine = swim(SMALL)
    machine.receive(0.0, OTHER, Gossip((Rumour(FRIEND, 0, SUSPECT),)))
    for number in range(1000):
        flood(machine, kind, number)
        machine.outbox.drain()
    machine.tick(0.01)
    machine.outbox.drain()
    weighed = weight(machine)
    for number in range(1000, 3000):
        flood(machine, kind, number)
        machine.outbox.drain()
    machine.tick(0.02)
    machine.outbox.drain()
    assert weight(machine) < weighed + 200


@pytest.mark.parametrize("kind", FLOODS)
def test_an_answer_to_a_flood_is_no_larger_than_the_bounds_allow(kind: str) -> None:
    machine = swim(SMALL)
    for number in range(300):
        flood(machine, kind, number)
        assert len(machine.outbox.drain()) < 40


def test_thousands_of_foreign_peers_in_one_view_fill_the_table_and_no_more() -> None:
    machine = swim(SwimConfig(max_members=100))
    view = tuple(alive(f"foreign-{number}") for number in range(20_000))
    machine.receive(0.0, FRIEND, PushPull(info(FRIEND), view))
    assert len(machine.members()) == 101
    assert machine.dropped["newcomer beyond max_members"] == 20_000 - 98
    assert machine.is_reachable(OTHER)


@pytest.mark.parametrize("dialled", ["", "seed:1", "friend:1"])
def test_a_reply_that_nobody_asked_for_is_counted_and_changes_nothing(dialled: str) -> None:
    machine = swim()
    view = (alive(FRIEND), alive(PeerId("foreign")), Rumour(OTHER, 0, DEAD))
    machine.receive(0.0, FRIEND, PushPullReply(info(FRIEND), view, dialled=dialled))
    assert machine.status(PeerId("foreign")) is None
    assert machine.status(OTHER) is ALIVE
    assert machine.dropped["view nobody asked for"] == 1


# -- between zones --

ZONES = Config(swim=SMALL, wan=SMALL)
LONG = "z" * 20_000


def zones() -> Zones:
    """A zone of three with a gateway that is this peer, and one known other zone."""
    machine = Zones(info(ME), ZONES, random.Random(1))
    machine.join(0.0, [])
    machine.receive(0.0, FRIEND, Gossip((alive(FRIEND), alive(OTHER))))
    for now in (0.1, 1.0, 1.5, 3.0):
        machine.tick(now)
    assert machine.is_gateway
    far = PeerInfo(PeerId("far"), "far", "there", ("far:1",))
    claim = Rumour(far.peer_id, 0, ALIVE, far)
    machine.receive(3.0, far.peer_id, wrap(PushPull(far, (claim,), joining=True, hello=True)))
    machine.outbox.drain()
    return machine


def flood_of_zones(machine: Zones, kind: str, number: int) -> None:
    new = f"new-{number}"
    now = 3.0 + number * 1e-6
    far = PeerInfo(PeerId(new), new, f"zone-{new}", (f"{new}:1",))
    claim = Rumour(far.peer_id, 0, ALIVE, far)
    match kind:
        case "hellos from elsewhere":
            machine.receive(now, far.peer_id, PushPull(far, (claim,), True, dialled="me:1"))
        case "hellos from zones with endless names":
            far = msgspec.structs.replace(far, zone=f"{new}-{LONG}")
            machine.receive(now, far.peer_id, PushPull(far, (), True, dialled="me:1"))
        case "replies from elsewhere":
            machine.receive(now, far.peer_id, PushPullReply(far, (claim,), dialled="seed:1"))
        case "introductions from elsewhere":
            machine.receive(now, FRIEND, Gossip((claim,)))
            machine.receive(now, FRIEND, PushPull(info(FRIEND), (claim,)))
        case "greetings":
            summaries = (ZoneSummary(new, 0, ()), ZoneSummary(far.zone, number + 1, (far,)))
            machine.receive(now, far.peer_id, ZoneGreeting(far, summaries, new))
        case "forged greetings":
            machine.receive(now, FRIEND, ZoneGreeting(far, (ZoneSummary(new, 1, ()),), new))
        case "garbage for gateways":
            machine.receive(now, FRIEND, WideArea("Ping", bytes([number % 256]) * 9))
        case "wrappings in wrappings":
            machine.receive(now, FRIEND, wrap(wrap(Ping(number))))
        case "pings among gateways":
            machine.receive(now, far.peer_id, wrap(Ping(number)))
        case "gateways that come and go":
            death = Rumour(far.peer_id, 0, DEAD)
            machine.receive(now, FRIEND, wrap(Gossip((claim, death))))
        case "summaries among gateways":
            machine.receive(now, FRIEND, wrap(Gossip(summaries=(ZoneSummary(new, 1, (far,)),))))
        case _:
            raise AssertionError(kind)


FLOODS_OF_ZONES = (
    "hellos from elsewhere",
    "hellos from zones with endless names",
    "replies from elsewhere",
    "introductions from elsewhere",
    "greetings",
    "forged greetings",
    "garbage for gateways",
    "wrappings in wrappings",
    "pings among gateways",
    "gateways that come and go",
    "summaries among gateways",
)


@pytest.mark.parametrize("kind", FLOODS_OF_ZONES)
def test_a_flood_from_elsewhere_makes_nothing_grow_either(kind: str) -> None:
    machine = zones()
    home = [view.peer_id for view in machine.members()]
    for number in range(1000):
        flood_of_zones(machine, kind, number)
        assert len(machine.outbox.drain()) < 40
    weighed = weight(machine)
    assert weighed < 10_000
    for number in range(1000, 3000):
        flood_of_zones(machine, kind, number)
        machine.outbox.drain()
    assert weight(machine) < weighed + 200
    assert [view.peer_id for view in machine.members()] == home


# -- all of it at once --


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("machine", ["swim", "zones"])
def test_a_living_cluster_survives_whatever_is_mangled(machine: str, seed: int) -> None:
    """A short run of fuzz_membership.py; its own checks are the test."""
    counts = fuzz(seed, machine)
    assert counts["mangled"] > 500
    assert counts["undecodable"] < counts["mangled"], "some of it must get through"


# -- the wrapping of what gateways say to each other --


@pytest.mark.parametrize("message", EXAMPLES[:8], ids=lambda message: type(message).__name__)
def test_what_is_wrapped_is_unwrapped(message: Message) -> None:
    assert unwrap(wrap(message)) == message


def test_a_wrapping_in_a_wrapping_is_no_message() -> None:
    with pytest.raises(Undecodable, match="not for the pool"):
        unwrap(wrap(wrap(Ping(1))))
    with pytest.raises(Undecodable, match="not for the pool"):
        unwrap(wrap(ZoneGreeting(info(STRANGER))))
    with pytest.raises(Undecodable):
        unwrap(WideArea("Ping", b""))
    with pytest.raises(Undecodable):
        unwrap(WideArea("DirectoryWritten", b"\x91\x01"))
