"""What one peer wrote: compared with what owners hold, repaired, and forgotten when it is over."""

from __future__ import annotations

from directory_cluster import KEY, Cluster, Peer, numbers, value

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.directory import RARELY, Directory, WriteDone
from tensorhub_p2p.protocol.directory.own import MAX_WITHDRAWN, OwnRegisters
from tensorhub_p2p.protocol.directory.pending import PendingRecords
from tensorhub_p2p.protocol.directory.records import (
    fence_name,
    group_key,
    holders_key,
    slot_name,
    versions_key,
)
from tensorhub_p2p.protocol.groups.forgetting import forget_group, forget_references
from tensorhub_p2p.protocol.identity import Group, PeerId, Slot
from tensorhub_p2p.protocol.machine import Send
from tensorhub_p2p.protocol.messages import (
    DirectoryCheck,
    DirectoryLacks,
    DirectoryWrite,
    Key,
    Register,
)

QUICK = DirectoryConfig(virtual_nodes=16, forget_hidden_after=1.0, keep_former_seconds=30.0)


def held_by(peer: Peer, key: Key = KEY) -> dict[str, int]:
    held = peer.directory._owner._held.get(key)
    return numbers(held.cells.registers()) if held is not None else {}


def live(cluster: Cluster) -> int:
    """Registers with a value at all owners together."""
    return sum(
        register.value is not None
        for peer in cluster.peers.values()
        for held in peer.directory._owner._held.values()
        for register in held.cells.values()
    )


def sent(cluster: Cluster, seconds: float) -> list[object]:
    """What directories send while nobody wants anything of them."""
    messages: list[object] = []
    for peer in cluster.peers.values():
        outbox = peer.directory.outbox
        send = outbox.send

        def note(to: PeerId, message: object, send: object = send) -> None:
            messages.append(message)
            send(to, message)  # type: ignore[operator]

        outbox.send = note  # type: ignore[method-assign, assignment]
    cluster.net.run_for(seconds)
    return messages


# --- comparing ---


def test_while_owners_hold_what_was_written_a_check_of_each_key_is_all_that_is_sent() -> None:
    cluster = Cluster(peers=5)
    for number in range(20):
        cluster.write(cluster[0], f"a{number}", number)
    cluster.net.run_for(1.0)
    messages = sent(cluster, 3 * cluster.config.repair_interval)
    assert {type(message) for message in messages} == {DirectoryCheck}
    assert len(messages) <= 3 * 6, "not one for each register"


def test_an_owner_that_lacks_one_register_is_told_just_that_one() -> None:
    cluster = Cluster(peers=3)
    for number in range(5):
        cluster.write(cluster[0], f"a{number}", number)
    cluster.net.run_for(1.0)
    lost = cluster[1].directory._owner._held[KEY].cells
    lost.drop((cluster[0].me, "a3"))
    messages = sent(cluster, 2 * cluster.config.repair_interval)
    assert held_by(cluster[1]) == {f"a{n}": n for n in range(5)}
    assert sum(isinstance(message, DirectoryWrite) for message in messages) == 1


def test_an_owner_that_holds_what_its_writer_has_forgotten_is_told_to_forget_it_too() -> None:
    """As one that was cut off when it was withdrawn, and for so long that nobody remembers."""
    cluster = Cluster(peers=3)
    writer, late = cluster[0], cluster[1]
    cluster.write(writer, "a", 1)
    cluster.write(writer, "b", 2)
    cluster.net.run_for(0.5)
    old = Register(writer.me, "gone", 3, 1, value(9))
    late.directory._owner._held[KEY].cells.merge(cluster.now, (old,))
    assert cluster.read(late)["gone"] == 9
    cluster.net.run_for(2 * cluster.config.repair_interval)
    assert cluster.read(late) == {"a": 1, "b": 2}


def test_a_list_by_somebody_who_is_no_owner_changes_nothing() -> None:
    cluster = Cluster(peers=6)
    writer = cluster[0]
    cluster.write(writer, "a", 1)
    other = next(p for p in cluster.peers.values() if p not in cluster.owners())
    message = DirectoryLacks(KEY, (("b", 5, 5),))
    writer.directory.receive(cluster.now, other.me, message)
    assert not [i for i in writer.directory.outbox.drain() if isinstance(i, Send)]
    assert writer.directory._own.get((KEY, "b")) is None


# --- forgetting ---


def test_what_nobody_needs_any_more_is_withdrawn_a_while_later() -> None:
    cluster = Cluster(peers=3, config=QUICK)
    cluster.write(cluster[0], "a", 1)
    cluster[0].directory.let_go(cluster.now, KEY, "a")
    cluster.net.run_for(0.9)
    assert cluster.read(cluster[1]) == {"a": 1}
    cluster.net.run_for(0.2)
    assert cluster.read(cluster[1]) == {}
    cluster.net.run_for(60.0)
    assert len(cluster[0].directory._own) == 0
    assert all(peer.directory._owner._held == {} for peer in cluster.peers.values())
    assert all(peer.directory._owner._count == 0 for peer in cluster.peers.values())


def test_what_is_written_again_meanwhile_stays() -> None:
    cluster = Cluster(peers=3, config=QUICK)
    cluster.write(cluster[0], "a", 1)
    cluster[0].directory.let_go(cluster.now, KEY, "a")
    cluster.net.run_for(0.5)
    cluster.write(cluster[0], "a", 2)
    cluster.net.run_for(5.0)
    assert cluster.read(cluster[1]) == {"a": 2}


def test_letting_go_of_what_was_never_written_is_nothing() -> None:
    directory = Cluster().start().directory
    directory.let_go(0.0, KEY, "a")
    assert directory._own.next_due() is None


def test_a_thousand_handles_under_made_up_names_leave_next_to_nothing() -> None:
    cluster = Cluster(peers=4, config=QUICK)
    peer = cluster[0]
    records = PendingRecords(peer.directory)

    def write(key: Key, name: str, number: int) -> None:
        records.write(cluster.now, key, name, number, value(number), lambda _now, _refused: None)
        cluster.net.settle(peer.me)

    for number in range(1, 1001):
        slot = Slot(Group("policy", f"made-up-{number}"), 0)
        name, group = slot_name(slot), group_key(slot.group)
        for key in (versions_key("policy"), holders_key("policy", 0), group):
            write(key, name, number)
        write(group, "generation", number)
        write(versions_key("policy"), fence_name(slot.group), number)
        cluster.net.run_for(0.01)
        forget_references(records, cluster.now, slot)
        forget_group(records, cluster.now, slot)
        if number % 100 == 0:
            assert live(cluster) <= 3 * 5 * 150, "those of the last second, at three owners"
    cluster.net.run_for(2.0)
    assert live(cluster) == 0
    cluster.net.run_for(60.0)
    assert all(peer.directory._owner._count < 100 for peer in cluster.peers.values())
    assert len(peer.directory._own) < 100


def test_withdrawn_registers_are_remembered_for_a_while_and_never_too_many() -> None:
    own = OwnRegisters(PeerId("me"), keep_withdrawn=10.0)
    for number in range(MAX_WITHDRAWN + 50):
        own.put(0.0, (KEY, f"{number}"), 1, value(1))
        own.put(0.0, (KEY, f"{number}"), 1, None)
    assert len(own) == MAX_WITHDRAWN
    own.put(20.0, (KEY, "last"), 1, None)
    assert own.get((KEY, "last")) is not None
    assert len(own) == 1
    assert own.fingerprint(KEY) == 0


def test_a_repair_goes_on_although_its_messages_get_lost() -> None:
    cluster = Cluster(seed=5, peers=3, loss=0.4)
    request = cluster[0].directory.write(cluster.now, KEY, "a", 1, value(1), 60.0)
    assert isinstance(cluster.ended(cluster[0], request), WriteDone)
    cluster.net.run_for(20 * cluster.config.repair_interval)
    assert [held_by(peer) for peer in cluster.peers.values()] == 3 * [{"a": 1}]


def test_a_directory_that_wrote_nothing_checks_nothing() -> None:
    cluster = Cluster(peers=3)
    directory: Directory = cluster[0].directory
    assert cluster.read(cluster[0]) == {}
    assert directory._repair_at is None


def test_where_nobody_needs_what_is_written_it_is_compared_less_often() -> None:
    cluster = Cluster(peers=8, config=DirectoryConfig(virtual_nodes=16, keep_former_seconds=600.0))
    writer = next(p for p in cluster.peers.values() if p not in cluster.owners())
    cluster.write(writer, "a", 1)
    cluster.write(writer, "b", 1)
    minutes, interval = 4 * 60.0, cluster.config.repair_interval

    def checks() -> int:
        found = sent(cluster, minutes)
        return sum(isinstance(message, DirectoryCheck) for message in found) // 3

    assert checks() >= 0.8 * minutes / interval
    writer.directory.let_go(cluster.now, KEY, "a")
    writer.directory.withdraw(cluster.now, KEY, "b", 0)
    cluster.net.settle(writer.me)
    assert 1 <= checks() <= 1.5 * minutes / (RARELY * interval)
