"""Who holds a shard is told to its pull: first whom the decision named, then the directory."""

from __future__ import annotations

from cluster import ROLLOUT, TRAINER, Cluster

from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages import DirectoryMessage, DirectoryRead, Message, PullHello
from tensorhub_p2p.protocol.messages import Source as Named
from tensorhub_p2p.protocol.shards.following import UNWATCHED
from tensorhub_p2p.protocol.shards.verbs import Answer, HoldersChanged
from tensorhub_p2p.sim.cluster.programs import Job
from tensorhub_p2p.sim.cluster.stage import ClusterSim
from tensorhub_p2p.sim.network import SimNetwork

AWAY = PeerId("f" * 16)


class Told:
    """A rollout's shard that may begin to pull; what its peer says and hears from then on."""

    def __init__(self) -> None:
        self.cluster = cluster = Cluster(0, 6)
        cluster.form(TRAINER, [0, 1])
        cluster.form(ROLLOUT, [2, 3])
        cluster.publish_all(TRAINER, [0, 1], 1)
        self.answers: list[Answer] = cluster.wait(
            *(cluster.ask(peer, Slot(ROLLOUT, peer - 2)) for peer in (2, 3))
        )
        self.node = cluster.nodes[2]
        self.publication: Publication = self.answers[0].publication
        self.trainer = Named(cluster.nodes[0].info.peer_id, Slot(TRAINER, 0))
        cluster.net.run_for(1.0)
        self.said = posted(cluster.net, self.node.info.peer_id, DirectoryMessage)

    def follow(self, *sources: Named) -> int:
        now = self.cluster.now
        number = self.node.follow(now, "policy", 0, self.publication, sources)
        self.cluster.net.settle(self.node.info.peer_id)
        return number

    @property
    def told(self) -> list[list[PeerId]]:
        return [
            [holder.peer for holder in event.holders]
            for _, peer, event in self.cluster.events
            if peer == 2 and isinstance(event, HoldersChanged)
        ]


def posted(network: SimNetwork, of: PeerId, *kinds: type[Message]) -> list[Message]:
    """What this peer says from now on, to itself too."""
    said: list[Message] = []
    post = network._post

    def noting(sender, there, to, message) -> None:  # type: ignore[no-untyped-def]
        if sender.peer_id == of and isinstance(message, kinds):
            said.append(message)
        post(sender, there, to, message)

    network._post = noting  # type: ignore[method-assign]
    return said


def test_whom_the_decision_named_is_told_at_once_and_the_directory_is_asked_later() -> None:
    rollout = Told()
    rollout.follow(rollout.trainer)
    assert rollout.told == [[rollout.trainer.peer]]
    rollout.cluster.net.run_for(0.9 * UNWATCHED)
    assert rollout.said == []
    rollout.cluster.net.run_for(0.2 * UNWATCHED)
    assert rollout.said
    rollout.cluster.net.run_for(1.0)
    assert rollout.told == [[rollout.trainer.peer]], "the directory says the same"


def test_what_the_directory_says_replaces_whom_the_decision_named() -> None:
    rollout = Told()
    rollout.follow(Named(AWAY, Slot(TRAINER, 0)))
    rollout.cluster.net.run_for(1.0)
    assert rollout.told == [[AWAY], [rollout.trainer.peer]]


def test_a_pull_that_is_soon_over_asks_the_directory_nothing() -> None:
    rollout = Told()
    follow = rollout.follow(rollout.trainer)
    rollout.cluster.net.run_for(0.9 * UNWATCHED)
    rollout.node.unfollow(rollout.cluster.now, follow)
    rollout.cluster.net.run_for(1.0)
    assert rollout.said == []


def test_who_is_gone_is_left_out_and_if_all_are_the_directory_is_asked_at_once() -> None:
    rollout = Told()
    cluster = rollout.cluster
    gone = Named(cluster.nodes[5].info.peer_id, Slot(TRAINER, 0))
    cluster.crash(5)
    cluster.until_dead(5)
    cluster.net.run_for(5.0)
    rollout.said.clear()
    rollout.follow(gone, rollout.trainer)
    assert (rollout.told, rollout.said) == ([[rollout.trainer.peer]], [])
    rollout.follow(gone)
    assert any(isinstance(message, DirectoryRead) for message in rollout.said)
    cluster.net.run_for(1.0)
    assert rollout.told == [[rollout.trainer.peer]] * 2


def test_each_shard_of_a_group_is_named_the_trainer_of_its_own() -> None:
    rollout = Told()
    trainers = [rollout.cluster.nodes[peer].info.peer_id for peer in (0, 1)]
    for shard, answer in enumerate(rollout.answers):
        assert answer.sources == (Named(trainers[shard], Slot(TRAINER, shard)),)


def test_a_pull_says_hello_before_it_has_asked_the_directory() -> None:
    jobs = [Job("trainer", "t", 0, 1, 4, period=100.0, keeps=True), Job("rollout", "r", 0, 1, 4)]
    sim = ClusterSim(4, jobs, seed=3)
    said = posted(sim.network, sim.peers[1], PullHello, DirectoryRead)
    sim.run_for(3.0)
    rollout = next(worker.peer for worker in sim.workers if worker.job.kind == "rollout")
    assert rollout.peer_id == sim.peers[1]
    assert all(token.startswith("v1") for token in rollout.handles[0].memory.tokens)
    kinds = [
        type(message)
        for message in said
        if isinstance(message, PullHello)
        or (isinstance(message, DirectoryRead) and message.key.kind == "holders")
    ]
    assert kinds[0] is PullHello
