"""The wire on one page: every message and every directory record.

Rules of this file. A message is a frozen msgspec struct, encoded as a MessagePack
array: fields are only ever appended, with defaults, so that older and newer peers
understand each other (extra fields are ignored, missing ones defaulted). How they are
packed, and what surrounds them, is envelope.py's.
Nothing here decides anything.

A message that answers another one repeats its `request`, `seq`, `pull` or
`(generation, call)`; receivers drop what they did not ask for.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from tensorhub_p2p.protocol.identity import (
    NOBODY,
    Generation,
    Group,
    Member,
    PeerId,
    PeerInfo,
    Publication,
    Slot,
)
from tensorhub_p2p.protocol.layout import TensorSpec

Short = Annotated[str, Meta(max_length=255)]
Count = Annotated[int, Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages; the class name is the kind on the wire."""

    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Message.kinds[cls.__name__] = cls


# --- membership (swim.py) ----------------------------------------------------------------


class Status(IntEnum):
    """What is held of a member. At one incarnation the larger value overrides the smaller.

    SUSPECT: silent, and nobody knows why. UNRESPONSIVE: silent, and somebody's sockets show
    that its process is there (paused, or Python's lock held); that is better knowledge.
    """

    ALIVE = 0
    SUSPECT = 1
    UNRESPONSIVE = 2
    DEAD = 3
    LEFT = 4


class Rumour(msgspec.Struct, frozen=True, array_like=True):
    """One claim about one member. `info` comes with the first news of a member.

    `accuser` is who found that out itself: independent accusers of a suspect are counted.
    """

    peer: PeerId
    incarnation: Count
    status: Status
    info: PeerInfo | None = None
    accuser: PeerId = NOBODY


class VersionHint(msgspec.Struct, frozen=True, array_like=True):
    """The newest (epoch, version) of a model, spread to every member as a hint.

    A higher `revision` beats any version: the one named before is no more (hints.py).
    """

    model: Short
    epoch: Count
    version: Count
    revision: Count = 0


class RetainSummary(msgspec.Struct, frozen=True, array_like=True):
    """What the handles of a zone retain of a model: the most of "newest", and single versions."""

    model: Short
    newest: Count
    versions: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()


class ZoneSummary(msgspec.Struct, frozen=True, array_like=True):
    """What a zone tells the others about itself; the higher `counter` is the newer."""

    zone: Short
    counter: Count
    gateways: tuple[PeerInfo, ...]
    """Who speaks for it, the one that wrote this first."""
    members: Count = 0
    """How many it has, about."""
    newest: tuple[VersionHint, ...] = ()
    """The newest version of each model that is whole there, the most recent news first."""
    retains: Annotated[tuple[RetainSummary, ...], Meta(max_length=64)] = ()
    """What its open handles want kept, by model."""
    retracted: Annotated[tuple[VersionHint, ...], Meta(max_length=256)] = ()
    """Versions that were taken back there, the newest of each model."""


class Ping(Message, frozen=True):
    """Direct probe; `seq` comes back in the `Ack`."""

    seq: Count
    rumours: tuple[Rumour, ...] = ()


class PingRequest(Message, frozen=True):
    """Please probe `target` for me: `Ack` me if it answers, `Nack` me if it does not in time."""

    seq: Count
    target: PeerId
    rumours: tuple[Rumour, ...] = ()


class Ack(Message, frozen=True):
    """`fingerprint` is of the sender's view; 0 if it doesn't say."""

    seq: Count
    rumours: tuple[Rumour, ...] = ()
    fingerprint: Count = 0


class Nack(Message, frozen=True):
    seq: Count
    rumours: tuple[Rumour, ...] = ()


class Gossip(Message, frozen=True):
    """News that found no probe to ride on."""

    rumours: tuple[Rumour, ...] = ()
    hints: tuple[VersionHint, ...] = ()
    summaries: tuple[ZoneSummary, ...] = ()


class ViewDigest(Message, frozen=True):
    """Anti-entropy's question: the fingerprint of each part of my view (anti_entropy.py).

    Who sees parts that differ answers with a `PushPull` of just those. `news` is the
    fingerprint of the version hints and zone summaries that I know.
    """

    parts: tuple[Count, ...]
    news: Count = 0


class PushPull(Message, frozen=True):
    """Anti-entropy: what I hold; answer with yours. A join is the first of these.

    `dialled` is the bare address that this was sent to, if it was; the reply repeats it.
    `parts` are those that `view` is about; none means that it is about everything. A `hello`
    holds just the sender itself: its view comes if there is an answer.
    """

    info: PeerInfo
    view: tuple[Rumour, ...]
    joining: bool = False
    hints: tuple[VersionHint, ...] = ()
    dialled: Short = ""
    parts: tuple[Count, ...] = ()
    hello: bool = False
    summaries: tuple[ZoneSummary, ...] = ()


class PushPullReply(Message, frozen=True):
    info: PeerInfo
    view: tuple[Rumour, ...]
    hints: tuple[VersionHint, ...] = ()
    dialled: Short = ""
    parts: tuple[Count, ...] = ()
    hello: bool = False
    summaries: tuple[ZoneSummary, ...] = ()


class WideArea(Message, frozen=True):
    """A membership message of the pool that the gateways of all zones form (zones.py)."""

    kind: Short
    body: bytes
    """The message, packed as on the wire."""


class ZoneGreeting(Message, frozen=True):
    """To a peer of another zone that called here: who speaks for which zone, as far as I know.

    `dialled` repeats the address under which I was found, if the call named one.
    """

    info: PeerInfo
    summaries: tuple[ZoneSummary, ...] = ()
    dialled: Short = ""


# --- directory (ring.py, directory.py) ---------------------------------------------------


class Key(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What a directory entry is filed under; its place on the ring is the hash of all three.

    kind "versions": part "" (which publications of the model exist, marks and pins);
    kind "holders": part = shard number (who has this shard of which publication);
    kind "group": part = replica name (slot claims, generations, floors);
    kind "retains": part "" (which versions of the model open handles want kept).
    """

    kind: Short
    model: Short
    part: Short = ""


class SlotClaim(msgspec.Struct, frozen=True, array_like=True, tag="slot"):
    """At key "group": the writer claims this shard of the replica (slots.py)."""

    shard: Count
    num_shards: Count
    counter: Count
    established: bool
    released: bool = False
    """Given back. The record stays, so that the next claim's counter is higher."""


class GenerationRecord(msgspec.Struct, frozen=True, array_like=True, tag="gen"):
    """An elected generation; `epoch` is the highest its candidate read.

    At key "group", where members find it, and at key "versions", where owners refuse what
    lower generations of the group still say (admission.py).
    """

    generation: Generation
    epoch: Count
    members: tuple[Member, ...]
    leader: Count
    """The leader's shard."""
    floor: tuple[int, int] = (-1, -1)
    """(epoch, version) of the group's last answer: the maximum over the members' votes."""


class Phase(IntEnum):
    """How far a shard's hold on a publication has come."""

    PARTIAL = 0
    """Pulling it: has some verified chunks, or none yet."""
    READY = 1
    """Has all of it: published it, or pulled it whole."""
    WITHDRAWING = 2
    """Still has it, but is about to hide it: no later mark may make it whole."""
    HIDDEN = 3
    """Gave it up. The record stays, so that owners can refuse late marks and pins."""


class VersionRecord(msgspec.Struct, frozen=True, array_like=True, tag="version"):
    """At key "versions": what one slot has at present. One register per slot and writer."""

    slot: Slot
    num_shards: Count
    publication: Publication
    phase: Phase
    generation: Generation
    """Of the writer's group, when it wrote this."""
    was_whole: bool = False
    """The writer knows that the publication was whole once."""
    spot: bool = False
    """The writer may be gone at any time: never a safe copy."""
    offload: bool = False
    """A copy in host memory, kept for others: not what a trainer or a rollout works with."""
    kept: bool = False
    """With WITHDRAWING or HIDDEN: somebody else has promised to keep this shard."""
    digests: bytes = b""
    """Digest of layout and digest list, once all were taken: equal ones are equal bytes."""


class WholeMark(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """At key "versions": every shard of the publishing replica was ready at once (G3)."""

    publication: Publication
    num_shards: Count


class Pin(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """At key "versions": a group decided to pull this publication in this call."""

    publication: Publication
    group: Group
    generation: Generation
    call: Count
    zone: Short = ""
    """The writer's, if that is another zone than the key's."""
    shards: tuple[Count, ...] = ()
    """Those that this zone has to keep for it; () stands for all."""


class HolderRecord(msgspec.Struct, frozen=True, array_like=True, tag="holder"):
    """At key "holders": the writer has this shard of this publication, whole or in part."""

    slot: Slot
    publication: Publication
    phase: Phase
    was_whole: bool
    num_bytes: Count
    memory: Short = "host"
    spot: bool = False
    offload: bool = False
    digests: bytes = b""
    """As in `VersionRecord`."""


class Retain(msgspec.Struct, frozen=True, array_like=True, tag="retain"):
    """At key "retains": what this peer's open handles want kept; one register a peer."""

    newest: Count = 0
    versions: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()


class DigestList(msgspec.Struct, frozen=True, array_like=True, tag="digests"):
    """At key "holders": a publication's chunk digests, left there by who withdraws it."""

    publication: Publication
    layout: bytes
    """Digest of the layout."""
    digests: Annotated[bytes, Meta(max_length=1 << 20)]
    """16 bytes a chunk."""


class Retraction(msgspec.Struct, frozen=True, array_like=True, tag="retracted"):
    """At key "versions": this version is bad and to be used by nobody. Writer `NOBODY`."""

    epoch: Count
    version: Count


class GroupFloor(msgspec.Struct, frozen=True, array_like=True, tag="floor"):
    """At key "group": (epoch, version) of a group's last answer, for those that replace it."""

    generation: Generation
    floor: tuple[int, int]


class Buckets(msgspec.Struct, frozen=True, array_like=True, tag="buckets"):
    """In bucket 0 of a key: over how many it is spread. Only doubles. Writer `NOBODY`."""

    count: Count


Value = (
    SlotClaim
    | GenerationRecord
    | VersionRecord
    | WholeMark
    | Pin
    | HolderRecord
    | Retain
    | DigestList
    | Retraction
    | GroupFloor
    | Buckets
)


class Register(msgspec.Struct, frozen=True, array_like=True):
    """One cell of the directory, written by one peer under one name.

    Merging is a maximum over (generation, sequence); withdrawing is a higher sequence
    with no value, never a deletion. `WholeMark`s are the exception that needs none:
    anyone may write one, under writer `NOBODY`, and all write the same.

    `generation` is the counter of the writer's generation; for a `SlotClaim`, of which
    generations are made, it is the claim's own counter.
    """

    writer: PeerId
    name: Annotated[str, Meta(max_length=1024)]
    generation: Count
    sequence: Count
    value: Value | None

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.sequence)

    @property
    def cell(self) -> tuple[PeerId, str]:
        return (self.writer, self.name)


class DirectoryMessage(Message, frozen=True):
    """Base of all that directories say to each other."""


class DirectoryWrite(DirectoryMessage, frozen=True):
    """`abroad`: the writer is of another zone, and views of this one's members are not for it.

    `buckets`: over how many the key is spread, as far as the writer knows (buckets.py).
    """

    request: Count
    key: Key
    owners_hash: Count
    register: Register
    abroad: bool = False
    buckets: Count = 1


class DirectoryWritten(DirectoryMessage, frozen=True):
    """`crowded`: this bucket of the key holds more than it should.

    `buckets`: over how many the key is spread, as far as this owner of bucket 0 knows.
    """

    request: Count
    crowded: bool = False
    buckets: Count = 1


class DirectoryRefused(DirectoryMessage, frozen=True):
    """The owner holds something that forbids this write; `because` is that register."""

    request: Count
    reason: Short
    because: Register | None = None


class DirectoryRead(DirectoryMessage, frozen=True):
    request: Count
    key: Key
    owners_hash: Count


class DirectoryValue(DirectoryMessage, frozen=True):
    """All registers of the key. A `warming` owner's answer does not count for R."""

    request: Count
    registers: tuple[Register, ...]
    warming: bool = False


class DirectoryMismatch(DirectoryMessage, frozen=True):
    """You and I disagree on who owns this key; I compare views with you (anti_entropy.py)."""

    request: Count


class DirectoryMerge(DirectoryMessage, frozen=True):
    """A warming owner asks a member of an earlier owner set for what it holds.

    `owners` is the set that the asker serves: who serves another one closes it.
    """

    request: Count
    key: Key
    owners: Annotated[tuple[PeerId, ...], Meta(max_length=64)] = ()


class DirectoryMerged(DirectoryMessage, frozen=True):
    """What the sender holds of the key, and the owner sets that it serves or must merge from."""

    request: Count
    registers: tuple[Register, ...]
    sets: Annotated[tuple[tuple[PeerId, ...], ...], Meta(max_length=64)] = ()


class DirectoryWatch(DirectoryMessage, frozen=True):
    """Tell me when this key changes, for the next `seconds`.

    `seen` is a fingerprint of what I last read; 0: tell me only of changes from now on.
    """

    key: Key
    seconds: float
    seen: Count = 0


class DirectoryChanged(DirectoryMessage, frozen=True):
    key: Key


class DirectoryCheck(DirectoryMessage, frozen=True):
    """You should hold what I wrote under this key; its fingerprint is this."""

    key: Key
    owners_hash: Count
    fingerprint: Count


class DirectoryLacks(DirectoryMessage, frozen=True):
    """I hold something else of yours under this key: please write it again.

    `held` is what I do hold: name, generation and sequence of each register.
    """

    key: Key
    held: Annotated[tuple[tuple[str, Count, Count], ...], Meta(max_length=256)] = ()


# --- slots and generations (slots.py, election.py) ---------------------------------------


class SlotChallenge(Message, frozen=True):
    """I claim your slot with this counter (0: I have none yet): do you still hold it?"""

    slot: Slot
    counter: Count


class SlotAnswer(Message, frozen=True):
    """`holds`: established, or a claim that beats yours. Otherwise I have yielded to you."""

    slot: Slot
    counter: Count
    holds: bool


class Propose(Message, frozen=True):
    """The candidate asks one claimant to accept this member list under this counter."""

    group: Group
    shard: Count
    record: GenerationRecord


class Vote(Message, frozen=True):
    """The claimant's answer; `highest` is the highest counter that it has accepted."""

    group: Group
    shard: Count
    generation: Generation
    accepted: bool
    highest: Count
    floor: tuple[int, int] = (-1, -1)
    """(epoch, version) of the last answer that this claimant got from its group."""
    sender_shard: Count = 0


class Formed(Message, frozen=True):
    """All voted, and the record is on W owners: the generation exists."""

    group: Group
    shard: Count
    record: GenerationRecord


class MemberLeft(Message, frozen=True):
    """The sender is no part of this generation any more: it closed, or the generation broke."""

    group: Group
    shard: Count
    generation: Generation
    sender_shard: Count


# --- group calls (calls.py) --------------------------------------------------------------


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What a call asks. verb "replicate": selector "7", "latest", "latest-2"; "wait_for": ">7"."""

    verb: Short
    selector: Short


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a call: all shards of the group get this publication."""

    publication: Publication
    num_shards: Count


class GroupMessage(Message, frozen=True):
    """Common head: `shard` is the addressee's, `sender_shard` the sender's."""

    group: Group
    generation: Generation
    shard: Count
    sender_shard: Count
    call: Count


class CallAsk(GroupMessage, frozen=True):
    """A member, in its verb, asks the leader. Also says that it is through with lower calls.

    `attempt` counts the member's verbs in this call: a timeout uses one up. `floor` is the
    member's last answer, which the last election may have missed.
    """

    question: Question
    attempt: Count = 0
    floor: tuple[int, int] = (-1, -1)


class CallWithdraw(GroupMessage, frozen=True):
    """The member's verb ended by its deadline: nobody waits there. May be lost without harm."""


class CallRecord(GroupMessage, frozen=True):
    """Leader to all: record this before anybody is told. `round` rises when it is decided anew."""

    question: Question
    decision: Decision
    round: Count = 0


class CallRecorded(GroupMessage, frozen=True):
    """Member to leader: recorded, what came with this `round`.

    Unless that is below `floor`, the member's own: then it is refused.
    """

    round: Count = 0
    floor: tuple[int, int] = (-1, -1)


class CallDecided(GroupMessage, frozen=True):
    """Recorded by all and pinned: members may act on it."""

    question: Question
    decision: Decision


class CallRecall(GroupMessage, frozen=True):
    """The leader is gone: was this call decided where you are? Answered by CallDecided."""


class CallDone(GroupMessage, frozen=True):
    """The member's pull (or wait) of this call succeeded; sent until acknowledged."""


class CallDoneAck(GroupMessage, frozen=True):
    pass


class CallGiveUp(GroupMessage, frozen=True):
    """Member to leader: the decided publication can't be had; sent until `CallVoid` comes."""

    reason: Annotated[str, Meta(max_length=1024)]


class CallVoid(GroupMessage, frozen=True):
    """Leader to all: the call is over; every member fails one verb for it and goes on."""

    reason: Annotated[str, Meta(max_length=1024)]


class CallOverAck(GroupMessage, frozen=True):
    """The member knows that the call is void, or diverged."""


class CallDivergence(GroupMessage, frozen=True):
    """Two members asked different questions in this call."""

    asked: Question
    by: Count
    but: Question
    but_by: Count


# --- retention (promising.py, reserving.py, retained.py) ----------------------------------


class KeepAsk(Message, frozen=True):
    """Whoever withdraws asks a holder: do you keep this shard?

    With `adopt` a peer that doesn't have it yet is asked to take a copy from `source`.
    """

    request: Count
    slot: Slot
    """The addressee's, by which it holds the shard; with `adopt` the sender's."""
    publication: Publication
    adopt: bool = False
    num_shards: Count = 1
    num_bytes: Count = 0
    asker: Slot | None = None
    """The sender's: of two that withdraw at once its hash decides (promising.py)."""


class KeepAnswer(Message, frozen=True):
    """A yes binds the sender. `working`: it is taking a copy, ask again."""

    request: Count
    yes: bool
    working: bool = False
    why: Short = ""


class ReserveAsk(GroupMessage, frozen=True):
    """Hold host memory for your shard of this publication; `ends`: no longer."""

    publication: Publication
    request: Count = 0
    ends: bool = False


class ReserveAnswer(GroupMessage, frozen=True):
    request: Count
    granted: bool
    why: Short = ""


# --- pulls (serving.py, swarm.py) --------------------------------------------------------


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """How one transport reads one exported region; opaque to everything but that transport."""

    transport: Short
    blob: bytes


class PullHello(Message, frozen=True):
    """A puller asks a holder for a lease on one shard of one publication.

    `layout` is the digest of the puller's layout; `endpoints` are wanted for `transports`.
    """

    pull: Short
    slot: Slot
    """The holder's slot, from its HolderRecord."""
    publication: Publication
    layout: bytes
    transports: tuple[Short, ...]
    have: bytes = b""
    """Bitmap of what the puller has verified; empty for nothing."""
    puller: Slot | None = None
    """Where others can ask the puller for what it has; None if it serves nobody."""


class PullOffer(Message, frozen=True):
    """The lease: what the holder has now, the digests it knows, and how to read.

    `have` and `known` are bitmaps (bit c of byte c//8); `digests` holds 16 bytes for each
    bit of `known`, in order. Not `granted`: all upload slots are in use; `others` are
    slots and peers being served right now, who can serve you in turn.
    """

    pull: Short
    slot: Slot
    publication: Publication
    granted: bool
    layout: bytes
    num_bytes: Count
    chunk_bytes: Count
    have: bytes
    known: bytes
    digests: bytes
    endpoints: tuple[Endpoint, ...]
    others: tuple[tuple[PeerId, Slot], ...] = ()


class PullUpdate(Message, frozen=True):
    """News for a leaseholder: the whole `have` bitmap, and digests that it may lack."""

    pull: Short
    slot: Slot
    have: bytes
    digests: tuple[tuple[Count, bytes], ...] = ()


class PullProgress(Message, frozen=True):
    """The puller lives and moves on: renews the lease; `wanted` chunks lack a digest."""

    pull: Short
    slot: Slot
    have: bytes
    wanted: tuple[Count, ...] = ()
    known: Count = 0
    """How many digests of the publication the puller knows."""


class PullBye(Message, frozen=True):
    """The lease ends; `complete` says that the puller has, and knows the digests of, all."""

    pull: Short
    slot: Slot
    complete: bool = False


class PullGone(Message, frozen=True):
    """No lease here (any more): withdrawn, never held, or the lease lapsed."""

    pull: Short
    slot: Slot
    reason: Short


class LayoutRequest(Message, frozen=True):
    """The layouts' digests differ: please send yours, from this tensor on."""

    pull: Short
    slot: Slot
    first: Count


class LayoutPage(Message, frozen=True):
    pull: Short
    slot: Slot
    first: Count
    total: Count
    tensors: tuple[TensorSpec, ...]


# --- abroad (abroad.py) ------------------------------------------------------------------


class ZoneAsk(Message, frozen=True):
    """To a gateway of another zone: what does your zone's directory hold under this key?"""

    request: Count
    key: Key


class ZoneAnswer(Message, frozen=True):
    """What others may use of the key's registers: nothing by the dead, and nothing hidden.

    `infos` are of the holders (key "holders" only), `owners` of the key's owners, in order.
    """

    request: Count
    key: Key
    registers: Annotated[tuple[Register, ...], Meta(max_length=8192)]
    infos: Annotated[tuple[PeerInfo, ...], Meta(max_length=8192)] = ()
    owners: Annotated[tuple[PeerInfo, ...], Meta(max_length=8)] = ()


class ZoneCheck(Message, frozen=True):
    """To a gateway of another zone: which of these peers of yours are dead, or have left?"""

    request: Count
    peers: Annotated[tuple[PeerId, ...], Meta(max_length=64)]


class ZoneChecked(Message, frozen=True):
    """Of those asked about: who died or left, and of whom nobody there has ever heard."""

    request: Count
    gone: Annotated[tuple[PeerId, ...], Meta(max_length=64)]
    unknown: Annotated[tuple[PeerId, ...], Meta(max_length=64)] = ()
