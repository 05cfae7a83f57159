"""What the users of a simulated cluster did and were told, in the order of time.

Rules of this file. Facts as values, each with its time, and who is told of them. What is
noted is what a user, a wire-tapper or somebody who looks at memory could see; where it is
asked of a machine, the fact says so. Nothing is judged here.

Facts of calls: `Began` and `Ended` of each verb of a handle, `Answered` and `Replicated`, and
what the handle has: `Opened`, `Offered`, `Holding`, `Withdraws`, `Lost`, `LetGo`. A copy that is
kept in host memory (keeping.py) counts as a handle of its own. Facts of memory: `Wrote`,
`DigestTaken`, `ReadBegan`. Facts of groups: `InForce` and `Broke`, read after each step off the
generation that a handle works in, and `GaveUp`. Facts of the wire: `Said`. Besides, `Probed`: what
readers and writers of the bare directory saw.

Bound: the newest `KEPT` facts are kept, for the story that is told of a failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from tensorhub_p2p.errors import TensorHubError
from tensorhub_p2p.protocol.identity import Generation, PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages import GenerationRecord, Message, Question, Retain
from tensorhub_p2p.sim.cluster.memory import Token

KEPT = 400


@dataclass(frozen=True)
class HandleId:
    """One handle: of which process, which slot, and a number that no other handle has."""

    peer: PeerId
    slot: Slot
    number: int

    def __str__(self) -> str:
        return f"{self.slot}@{self.peer[:4]}/{self.number}"


@dataclass(frozen=True)
class Fact:
    """Something happened to a handle."""

    handle: HandleId

    def __str__(self) -> str:
        values = (getattr(self, f.name) for f in fields(self) if f.name != "handle")
        told = " ".join(_brief(value) for value in values if value not in (None, -1))
        return f"{self.handle}  {type(self).__name__} {told}"


def _brief(value: object) -> str:
    if isinstance(value, GenerationRecord):
        return str(value.generation)
    if isinstance(value, Publication):
        return f"<{value.epoch}.{value.version} by {value.replica} {value.generation}>"
    if isinstance(value, Question):
        return f"{value.verb}({value.selector})"
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {str(value)[:160]}"
    if isinstance(value, Message):
        return type(value).__name__
    return str(value)


@dataclass(frozen=True)
class Began(Fact):
    """A user called a verb."""

    number: int
    verb: str
    deadline: float
    version: int = -1
    """Of a publish, or of a retract."""
    question: Question | None = None
    """Of a group call."""


@dataclass(frozen=True)
class Ended(Fact):
    """It returned, or raised."""

    number: int
    verb: str
    error: TensorHubError | None = None
    publication: Publication | None = None
    """What was published, answered or taken back."""


@dataclass(frozen=True)
class Opened(Fact):
    """`open` returned: what it wants kept is on record."""

    spot: bool
    retain: Retain | None


@dataclass(frozen=True)
class Answered(Fact):
    """The group decided this for a `replicate` or `wait_for` (its `number`)."""

    number: int
    question: Question
    publication: Publication
    num_shards: int
    generation: GenerationRecord | None
    """That gave the answer: asked of the machine."""
    call: int


@dataclass(frozen=True)
class Replicated(Fact):
    """`replicate` returned: this is in the tensors now."""

    question: Question
    publication: Publication
    generation: GenerationRecord | None
    call: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class InForce(Fact):
    """The handle works in this generation from now on."""

    record: GenerationRecord


@dataclass(frozen=True)
class Broke(Fact):
    """The handle noticed that its generation is no longer in force."""

    record: GenerationRecord


@dataclass(frozen=True)
class GaveUp(Fact):
    """It asked its leader to void this call."""

    generation: Generation
    call: int


@dataclass(frozen=True)
class Wrote(Fact):
    """The user changed the tensors."""

    content: str


@dataclass(frozen=True)
class Offered(Fact):
    """The handle is about to publish what its tensors are now."""

    version: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Holding(Fact):
    """The handle is about to announce what a pull brings, or with `whole` what it brought."""

    publication: Publication
    whole: bool


@dataclass(frozen=True)
class Withdraws(Fact):
    """The handle is about to give up what it has: it asks who needs it."""

    publication: Publication


@dataclass(frozen=True)
class Lost(Fact):
    """Its user is told that what it had is gone, though somebody may have wanted it."""

    publication: Publication
    why: str


@dataclass(frozen=True)
class LeftWell(Fact):
    """Its process has handed on what it kept, but for what is `lost`; it will leave now."""

    lost: tuple[str, ...]


@dataclass(frozen=True)
class LetGo(Fact):
    """Nobody may begin to read it here any more: taken back, aborted, dropped or closed."""

    publication: Publication


@dataclass(frozen=True)
class DigestTaken(Fact):
    """A chunk was read, to take its digest or to copy it."""

    publication: Publication
    chunk: int
    holds: bool
    """Whether the node still counted the publication as held, and not as hidden."""


@dataclass(frozen=True)
class ReadBegan(Fact):
    """A puller (`handle`) began to read a chunk there."""

    source: PeerId
    slot: Slot
    publication: Publication
    chunk: int


@dataclass(frozen=True)
class Probed:
    """Somebody wrote (`value`) or read (`values`) registers of the probe key of the directory."""

    peer: PeerId
    began: float
    name: str = ""
    """Of a write: of which of the peer's registers."""
    value: int = -1
    ended: bool = False
    """Of a write: it is on W owners. A read is noted when it ended."""
    values: Mapping[tuple[PeerId, str], int] | None = None
    """By register: its writer and its name."""


@dataclass(frozen=True)
class Said(Fact):
    """The handle's peer sent this about the handle's slot."""

    message: Message


@dataclass
class History:
    """All of one run. `now` reads the clock of the run."""

    now: Callable[[], float]
    listeners: list[Callable[[float, Fact], None]] = field(default_factory=list)
    probers: list[Callable[[float, Probed], None]] = field(default_factory=list)
    facts: deque[tuple[float, Fact]] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0
    """Facts noted so far."""

    def note(self, fact: Fact) -> None:
        now = self.now()
        self.count += 1
        self.facts.append((now, fact))
        for listener in self.listeners:
            listener(now, fact)

    def note_probe(self, probe: Probed) -> None:
        for listener in self.probers:
            listener(self.now(), probe)

    def story(self, limit: int = 40) -> Iterator[str]:
        """The last facts, one a line."""
        for at, fact in list(self.facts)[-limit:]:
            yield f"{at:9.4f} {fact}"
