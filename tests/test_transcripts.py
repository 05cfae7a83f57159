"""Plays the stories in tests/transcripts/*.txt and compares each line of what happened.

A story is a list of commands, each followed by `----`, what came of it, and an empty line.
Lines that start with `#` tell what it is about. To write down what happens now, after a
change that is meant: REWRITE_TRANSCRIPTS=1 pytest tests/test_transcripts.py, then read the
difference.

    config NAME=VALUE ...          fields of SwimConfig; before everything else
    members A B ... puppets P ...  they know each other since long. Puppets do nothing of their
                                   own: what is sent to them is shown, and they `say` what the
                                   story wants them to
    start A / join A SEED ...      a new peer; it looks for the cluster behind these peers
    tick SECONDS                   time passes; what is sent waits in a pool
    run SECONDS                    time passes, messages take 10 ms; shows what peers notice
    trace SECONDS                  the same; shows messages and looks at sockets too
    deliver / drop A -> B [KIND]   of the pool's messages, those from A to B ("*": anyone)
    say P -> A MESSAGE             P's message arrives, written as messages are shown; "F@B" is
                                   a peer F that lives at B's address
    evidence A B WHAT              the sockets of A show this of B
    crash A / pause A / resume A / leave A / hint A MODEL VERSION
    cut A B | C D / heal           nothing gets across
    status                         what everybody holds of the others
    verdict A B                    when A will declare B dead, as it stands

Chance is rigged: nothing is shuffled, the first ones are drawn, and times fall in the middle
of their range. So a peer's first probe comes after half an interval and goes to the member
named first; the sequence numbers of its probes count from 1.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from stories import retell

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.envelope import Envelope, encode, open_envelope, pack, unpack
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event, Send
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import (
    Evidence,
    Joined,
    Left,
    Look,
    MemberChanged,
    MemberForgotten,
    NewerVersion,
    Refuted,
    SeedIsSelf,
    Unheard,
    WasAbsent,
)
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
    ViewDigest,
)

CONFIG = SwimConfig(
    probe_interval=1.0,
    probe_timeout=0.5,
    indirect_probes=3,
    suspicion_multiplier=4.0,
    suspicion_max_multiplier=6.0,
    suspicion_confirmations=3,
    gossip_interval=0.2,
    gossip_nodes=3,
    retransmit_multiplier=2,
    push_pull_interval=60.0,
    mismatch_interval=2.0,
    refused_suspicion=0.25,
    unreachable_suspicion=1.5,
    unresponsive_limit=60.0,
    watched_neighbours=3,
    doubt_limit=30.0,
    gossip_to_dead_for=30.0,
    join_retry=0.5,
    redial_interval=5.0,
    pause_after=1.0,
)
"""The stories' own, so that they stay as they are while the defaults are tuned."""
STORIES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
LATENCY = 0.01
T = TypeVar("T")

KINDS: dict[str, type[Message]] = {
    "ping": Ping,
    "ping-request": PingRequest,
    "ack": Ack,
    "nack": Nack,
    "gossip": Gossip,
    "view-digest": ViewDigest,
    "push-pull": PushPull,
    "reply": PushPullReply,
}


class Rigged(random.Random):
    """Draws what a reader expects."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def randint(self, a: int, b: int) -> int:
        return b

    def shuffle(self, x: MutableSequence[Any]) -> None:
        pass

    def sample(self, population: Sequence[T], k: int, *, counts: Any = None) -> list[T]:
        return list(population[:k])

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[0]


# -- messages and events as the stories show them --


def show_rumour(rumour: Rumour) -> str:
    words = [rumour.peer, rumour.status.name.lower(), str(rumour.incarnation)]
    if rumour.info is not None:
        words.append("introduced")
    if rumour.accuser != NOBODY:
        words.append(f"by {rumour.accuser}")
    return " ".join(words)


def show(message: Message) -> str:
    kind = next(name for name, each in KINDS.items() if each is type(message))
    words = [kind]
    if isinstance(message, (Ping, PingRequest, Ack, Nack)):
        words.append(str(message.seq))
    if isinstance(message, PingRequest):
        words.append(message.target)
    if isinstance(message, Gossip):
        words += [f"{hint.model}={hint.version}" for hint in message.hints]
    if isinstance(message, (PushPull, PushPullReply)):
        words += ["hello"] if message.hello else []
        words += ["joining"] if isinstance(message, PushPull) and message.joining else []
        words += [f"{hint.model}={hint.version}" for hint in message.hints]
        words += [f"{len(message.parts)}-parts"] if message.parts else []
    rumours = getattr(message, "rumours", ()) or getattr(message, "view", ())
    if rumours:
        words.append("[" + ", ".join(map(show_rumour, rumours)) + "]")
    return " ".join(words)


def read_rumour(text: str, sender: PeerInfo) -> Rumour:
    name, status, incarnation, *rest = text.split()
    peer = PeerId(name)
    known = sender if peer == sender.peer_id else info_of(peer)
    info = known if "introduced" in rest else None
    accuser = rest[rest.index("by") + 1] if "by" in rest else NOBODY
    return Rumour(peer, int(incarnation), Status[status.upper()], info, PeerId(accuser))


def read(sender: PeerInfo, text: str) -> Message:
    head, _, tail = text.partition("[")
    claims = (claim for claim in tail.rstrip("]").split(",") if claim.strip())
    rumours = tuple(read_rumour(claim, sender) for claim in claims)
    kind, *words = head.split()
    if kind == "push-pull":
        return PushPull(sender, rumours, "joining" in words, hello="hello" in words)
    if kind == "reply":
        return PushPullReply(sender, rumours, hello="hello" in words)
    if kind == "ping-request":
        return PingRequest(int(words[0]), PeerId(words[1]), rumours)
    return KINDS[kind](*map(int, words), rumours)


def show_event(event: Event) -> str:
    match event:
        case MemberChanged(member=member, old=old):
            was = "(unknown)" if old is None else old.name.lower()
            return f"{member.peer_id} {was} -> {member.status.name.lower()}"
        case Look(peer=peer):
            return f"looks at the sockets of {peer}"
        case WasAbsent(reason=reason):
            return f"was absent: {reason}"
        case Refuted(incarnation=incarnation, claim=claim):
            return f"refutes that it is {claim.name.lower()}: alive {incarnation}"
        case Unheard(peer=peer):
            return f"doesn't get through to {peer}"
        case Joined(peer=peer):
            return f"joined through {peer}"
        case SeedIsSelf(address=address):
            return f"is its own seed {address}"
        case MemberForgotten(peer=peer):
            return f"forgets {peer}"
        case NewerVersion(model=model, version=version):
            return f"hears of version {version} of {model}"
        case Left():
            return "left"
    raise AssertionError(event)


def info_of(peer: PeerId, host: str = "") -> PeerInfo:
    return PeerInfo(peer, peer, "here", (f"{host or peer}:1",))


def over_the_wire(message: Message) -> Message:
    kind, body = pack(message)
    return unpack(open_envelope(encode(Envelope(1, "", "", NOBODY, "", NOBODY, kind, body))))


# -- the world --


@dataclass(frozen=True)
class Letter:
    sender: PeerId
    to: PeerId
    message: Message


class World:
    """Some machines and what is on its way between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.config = CONFIG
        self.machines: dict[PeerId, Swim] = {}
        self.crashed: set[PeerId] = set()
        self.paused: dict[PeerId, list[Letter]] = {}
        self.side: dict[PeerId, int] = {}
        self.pool: list[Letter] = []
        self.flying: list[tuple[float, int, Letter]] = []
        self.flies = False
        self.lines: list[str] = []
        self.shows_messages = True
        self.shows_time = False
        self._order = count()

    def play(self, command: str) -> str:
        name, *words = command.split()
        self.lines = []
        handler: Callable[..., None] | None = getattr(self, f"do_{name}", None)
        assert handler is not None, f"no such command: {command}"
        handler(*words)
        return "\n".join(self.lines or ["ok"])

    # -- commands --

    def do_config(self, *settings: str) -> None:
        kinds = {field.name: type(getattr(self.config, field.name)) for field in fields(SwimConfig)}
        pairs = (setting.split("=") for setting in settings)
        changes = {name: kinds[name](value) for name, value in pairs}
        self.config = replace(self.config, **changes)

    def do_members(self, *words: str) -> None:
        split = words.index("puppets") if "puppets" in words else len(words)
        infos = [info_of(PeerId(word)) for word in words if word != "puppets"]
        for word in words[:split]:
            self.do_start(word)
            self.machines[PeerId(word)].adopt(self.now, infos)

    def do_start(self, name: str) -> None:
        peer = PeerId(name)
        self.machines[peer] = Swim(info_of(peer), self.config, Rigged())

    def do_join(self, name: str, *seeds: str) -> None:
        self._machine(name).join(self.now, [f"{seed}:1" for seed in seeds])
        self._collect(PeerId(name))

    def do_tick(self, seconds: str) -> None:
        self._pass(float(seconds), flies=False, shows_messages=True)

    def do_run(self, seconds: str) -> None:
        self._pass(float(seconds), flies=True, shows_messages=False)

    def do_trace(self, seconds: str) -> None:
        self._pass(float(seconds), flies=True, shows_messages=True)

    def do_deliver(self, *pattern: str) -> None:
        for letter in self._take(pattern):
            self._arrive(letter)

    def do_drop(self, *pattern: str) -> None:
        self._take(pattern)

    def do_say(self, sender: str, _arrow: str, to: str, *message: str) -> None:
        peer, _, host = sender.partition("@")
        said = read(info_of(PeerId(peer), host or peer), " ".join(message))
        self._arrive(Letter(PeerId(peer), PeerId(to), said))

    def do_evidence(self, name: str, of: str, what: str) -> None:
        self._machine(name).evidence(self.now, PeerId(of), Evidence[what])
        self._collect(PeerId(name))

    def do_crash(self, *names: str) -> None:
        self.crashed.update(map(PeerId, names))

    def do_pause(self, name: str) -> None:
        self.paused[PeerId(name)] = []

    def do_resume(self, name: str) -> None:
        for letter in self.paused.pop(PeerId(name)):
            self._arrive(letter)
        self._machine(name).tick(self.now)
        self._collect(PeerId(name))

    def do_leave(self, name: str) -> None:
        self._machine(name).leave(self.now)
        self._collect(PeerId(name))

    def do_hint(self, name: str, model: str, version: str) -> None:
        self._machine(name).hint(self.now, model, 0, int(version))

    def do_cut(self, *words: str) -> None:
        side = 0
        for word in words:
            side += word == "|"
            self.side[PeerId(word)] = side

    def do_heal(self) -> None:
        self.side.clear()

    def do_status(self) -> None:
        for peer, machine in self.machines.items():
            if peer not in self.crashed:
                views = sorted(machine.members(), key=lambda view: view.peer_id)
                held = (f"{v.peer_id} {v.status.name.lower()} {v.incarnation}" for v in views)
                self.lines.append(f"{peer}: {', '.join(held)}")

    def do_verdict(self, name: str, of: str) -> None:
        deadline = self._machine(name)._opinions.verdicts.deadline(PeerId(of))
        if deadline is None:
            self.lines.append("never")
        else:
            self.lines.append(f"in {deadline - self.now:.2f} s")

    # -- time and messages --

    def _machine(self, name: str) -> Swim:
        return self.machines[PeerId(name)]

    def _running(self) -> list[PeerId]:
        return [p for p in self.machines if p not in self.crashed and p not in self.paused]

    def _pass(self, seconds: float, *, flies: bool, shows_messages: bool) -> None:
        end = round(self.now + seconds, 6)
        self.shows_time, self.flies, self.shows_messages = True, flies, shows_messages
        if flies:
            self._send_off(self.pool)
            self.pool = []
        while (due := self._next_instant()) is not None and due <= end:
            self.now = max(self.now, due)
            self._instant()
        self.now = end
        self.shows_time, self.flies, self.shows_messages = False, False, True

    def _next_instant(self) -> float | None:
        wakeups = (self.machines[peer].next_wakeup() for peer in self._running())
        times = [time for time in wakeups if time is not None]
        times += [time for time, _, _ in self.flying[:1]]
        return min(times, default=None)

    def _instant(self) -> None:
        while self.flying and self.flying[0][0] <= self.now:
            self._arrive(heapq.heappop(self.flying)[2])
        for peer in self._running():
            wakeup = self.machines[peer].next_wakeup()
            if wakeup is not None and wakeup <= self.now:
                self.machines[peer].tick(self.now)
                self._collect(peer)
                again = self.machines[peer].next_wakeup()
                assert again is None or again > self.now, f"{peer} spins at {self.now}"

    def _collect(self, peer: PeerId) -> None:
        for item in self.machines[peer].outbox.drain():
            if isinstance(item, Event):
                if self.shows_messages or not isinstance(item, Look):
                    self._note(f"{peer} {show_event(item)}")
                continue
            to = item.to if isinstance(item, Send) else PeerId(item.address.split(":")[0])
            where = to if isinstance(item, Send) else item.address
            message = over_the_wire(item.message)
            assert message == item.message
            if self.shows_messages:
                self._note(f"{peer} -> {where}  {show(message)}")
            if to in self.machines:
                letter = Letter(peer, to, message)
                if self.flies:
                    self._send_off([letter])
                else:
                    self.pool.append(letter)

    def _send_off(self, letters: list[Letter]) -> None:
        for letter in letters:
            heapq.heappush(self.flying, (self.now + LATENCY, next(self._order), letter))

    def _arrive(self, letter: Letter) -> None:
        to = letter.to
        if to in self.crashed or self.side.get(letter.sender) != self.side.get(to):
            return
        if to in self.paused:
            self.paused[to].append(letter)
            return
        self.machines[to].receive(self.now, letter.sender, letter.message)
        self._collect(to)

    def _take(self, pattern: Sequence[str]) -> list[Letter]:
        sender, _, to, kind = (*pattern, *("*", "->", "*", "*")[len(pattern) :])
        taken = [
            letter
            for letter in self.pool
            if sender in ("*", letter.sender)
            and to in ("*", letter.to)
            and (kind == "*" or type(letter.message) is KINDS[kind])
        ]
        assert taken, f"nothing to take for {' '.join(pattern)}"
        self.pool = [letter for letter in self.pool if letter not in taken]
        return taken

    def _note(self, line: str) -> None:
        self.lines.append(f"{self.now:6.2f}  {line}" if self.shows_time else line)


# -- the stories --


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_the_story_goes_as_it_is_told(story: Path) -> None:
    retell(story, World().play)


def test_there_are_stories() -> None:
    assert len(STORIES) >= 10


@pytest.mark.parametrize(
    "text",
    [
        "ping 1",
        "ping-request 7 c [b suspect 0 by a]",
        "ack 3 [c alive 0 introduced, d dead 2 by e]",
        "nack 3",
        "gossip [c left 1]",
        "push-pull hello joining [b alive 0 introduced]",
        "reply [b alive 0 introduced]",
    ],
)
def test_messages_are_read_as_they_are_shown(text: str) -> None:
    assert show(read(info_of(PeerId("b")), text)) == text


def test_every_message_of_membership_can_be_told() -> None:
    membership = {Ping, PingRequest, Ack, Nack, Gossip, ViewDigest, PushPull, PushPullReply}
    assert set(KINDS.values()) == membership
