"""Plays the stories in tests/transcripts/groups/*.txt: whole peers, and what their groups say.

A story is a list of commands, each followed by `----`, what came of it, and an empty line, as in
stories.py. To write down what happens now, after a change that is meant:
REWRITE_TRANSCRIPTS=1 pytest tests/test_group_transcripts.py, then read the difference.

    peers A B ...                  they know each other since long
    new E                          one more; goes on when all know it
    crash A / pause A / resume A   what the name says
    dead A                         time passes until all others hold it for dead
    run SECONDS                    time passes
    show KIND ... / hide KIND ...  which messages are shown, by the name of their class in words:
                                   those of groups, slots and retention are from the beginning
    keep BYTES                     peers that start from now on may offload so many
    VERB + VERB ... [!]            verbs that begin at the same moment; goes on when all have ended,
                                   or, with "!", at once
    end                            goes on when all verbs have ended

Verbs are written as `PEER VERB REPLICA/SHARD ARGUMENTS`: `A open trainer/0 of 2`, `A publish
trainer/0 7`, `A unpublish trainer/0`, `A ask rollout/0 latest`, `A got rollout/0` (the pull of the
last answer has succeeded), `A lacks rollout/0` (it can't be had), `A close trainer/0`.

Shown is what peers say to each other, not what they say to themselves, in the order in which
it is said; what they write to the directory and what came of that; and how verbs end. Every
message takes 10 ms; which peers own a key is left out, as it follows from their ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import QUICK, Cluster
from stories import retell

from tensorhub_p2p.config import Config
from tensorhub_p2p.protocol.directory.records import Refused
from tensorhub_p2p.protocol.identity import Generation, Group, Publication, Slot
from tensorhub_p2p.protocol.messages import (
    CallAsk,
    CallDecided,
    CallRecord,
    CallRecorded,
    Formed,
    GenerationRecord,
    GroupFloor,
    GroupMessage,
    HolderRecord,
    KeepAnswer,
    KeepAsk,
    MemberLeft,
    Message,
    Pin,
    Propose,
    Question,
    SlotAnswer,
    SlotChallenge,
    SlotClaim,
    VersionRecord,
    Vote,
    WholeMark,
)
from tensorhub_p2p.protocol.node import Node
from tensorhub_p2p.protocol.shards.verbs import Answer, Done, Failed

STORIES = sorted((Path(__file__).parent / "transcripts" / "groups").glob("*.txt"))
LATENCY = 0.01
SHOWN = (
    GroupMessage,
    Propose,
    Vote,
    Formed,
    MemberLeft,
    SlotChallenge,
    SlotAnswer,
    KeepAsk,
    KeepAnswer,
)


def words(kind: type) -> str:
    """The name of a class, in words: CallAsk is call-ask."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower()


def show_generation(generation: Generation) -> str:
    return f"g{generation.counter}"


def show_publication(publication: Publication) -> str:
    epoch = f" epoch {publication.epoch}" if publication.epoch else ""
    return f"v{publication.version}{epoch} of {publication.replica}"


def show_value(value: object) -> str:
    match value:
        case None:
            return "withdrawn"
        case SlotClaim(counter=counter, established=established, released=released):
            state = "released" if released else "established" if established else "tried"
            return f"claim {counter} {state}"
        case GenerationRecord(generation=generation):
            return show_generation(generation)
        case VersionRecord(publication=what, phase=phase, generation=generation):
            was_whole = " whole" if value.was_whole else ""
            kept = " kept" if value.kept else ""
            generation_ = show_generation(generation)
            return f"{show_publication(what)} {phase.name.lower()}{was_whole}{kept} {generation_}"
        case Pin(publication=what, call=call):
            return f"{show_publication(what)} for call {call}"
        case GroupFloor(floor=floor):
            return f"floor v{floor[1]}"
    return words(type(value))


class World:
    """Some peers, and what is told of them."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.names: list[str] = []
        self.lines: list[str] = []
        self.extra: set[str] = set()
        self.hidden: set[str] = set()
        self.running: dict[int, str] = {}
        self.answers: dict[tuple[str, Slot], Answer] = {}
        self.offload_limit = 0

    def play(self, command: str) -> str:
        self.lines = []
        name, *rest = command.split()
        handler: Callable[..., None] | None = getattr(self, f"do_{name}", None)
        if handler is not None:
            handler(*rest)
        else:
            self.verbs(command)
        return "\n".join(self.lines or ["ok"])

    def it(self) -> Cluster:
        assert self.cluster is not None, "first say which peers there are"
        return self.cluster

    # -- commands --

    def do_peers(self, *names: str) -> None:
        self.cluster = Cluster(
            latency=(LATENCY, LATENCY),
            config=Config(swim=QUICK),
            offload_limit=self.offload_limit,
        )
        post = self.cluster.net._post

        def posting(sender: Any, there: Any, to: Any, message: Message) -> None:
            self.said(sender.peer_id, to, message)
            post(sender, there, to, message)

        self.cluster.net._post = posting  # type: ignore[method-assign]
        for name in names:
            self.names.append(name)
            self.listen(self.cluster.start(meet=False))
        self.cluster.until(self.cluster._all_met)

    def do_new(self, name: str) -> None:
        self.names.append(name)
        index = self.it().start(meet=False)
        self.listen(index)
        self.it().until(self.it()._all_met)

    def do_keep(self, limit: str) -> None:
        self.offload_limit = int(limit)
        if self.cluster is not None:
            self.cluster.offload_limit = self.offload_limit

    def do_crash(self, name: str) -> None:
        self.it().crash(self.names.index(name))

    def do_pause(self, name: str) -> None:
        self.it().pause(self.names.index(name))

    def do_resume(self, name: str) -> None:
        self.it().resume(self.names.index(name))

    def do_dead(self, name: str) -> None:
        self.it().until_dead(self.names.index(name))

    def do_run(self, seconds: str) -> None:
        self.it().net.run_for(float(seconds))

    def do_show(self, *kinds: str) -> None:
        self.extra |= set(kinds)
        self.hidden -= set(kinds)

    def do_hide(self, *kinds: str) -> None:
        self.hidden |= set(kinds)

    def do_end(self) -> None:
        self.wait(list(self.running))

    # -- verbs --

    def verbs(self, command: str) -> None:
        text, waits = command.removesuffix("!"), not command.endswith("!")
        started = [self.verb(*part.split()) for part in text.split("+")]
        if waits:
            self.wait([number for number in started if number])

    def verb(self, name: str, verb: str, slot_text: str, *rest: str) -> int:
        """Start it; returns its number, 0 if there is nothing to wait for."""
        cluster, peer = self.it(), self.names.index(name)
        replica, _, shard = slot_text.partition("/")
        slot = Slot(Group("policy", replica), int(shard))
        called = " ".join((name, verb, slot_text, *rest))
        if verb == "lacks":
            cluster.give_up(peer, slot, self.answers[(name, slot)], "no chunk is left")
            return 0
        number = self.start_verb(verb, cluster, peer, slot, *rest)
        if number not in self.running and cluster.verbs[number].end is None:
            self.running[number] = called
            cluster.on_end[number] = lambda running: self.ended(running.number, called)
        elif number not in self.running:
            self.ended(number, called)
        return number

    def start_verb(self, verb: str, cluster: Cluster, peer: int, slot: Slot, *rest: str) -> int:
        if verb == "open":
            return cluster.open(peer, slot, int(rest[1]), timeout=60.0)
        if verb == "publish":
            return cluster.publish(peer, slot, int(rest[0]))
        if verb == "ask":
            return cluster.ask(peer, slot, Question("replicate", rest[0]), timeout=30.0)
        if verb == "got":
            return cluster.hold(peer, slot, self.answers[(self.names[peer], slot)])
        if verb in ("unpublish", "close"):
            number: int = getattr(cluster, verb)(peer, slot)
            return number
        raise AssertionError(f"no such verb: {verb}")

    def ended(self, number: int, called: str) -> None:
        self.running.pop(number, None)
        verb = self.it().verbs[number]
        name = self.names[verb.peer]
        end = verb.end
        assert isinstance(end, (Done, Failed))
        if isinstance(end, Failed):
            self.lines.append(f"{called}: {type(end.error).__name__}: {end.error}")
        elif isinstance(end.result, Answer):
            assert verb.slot is not None
            self.answers[(name, verb.slot)] = end.result
            what = show_publication(end.result.publication)
            self.lines.append(f"{called}: call {end.result.call} is {what}")
        else:
            self.lines.append(f"{called}: done")
        if called.split()[1] == "got" and verb.slot is not None:
            error = self.it().finish(verb.peer, verb.slot, self.answers[(name, verb.slot)])
            if error is not None:
                self.lines.append(f"{called}: {type(error).__name__}: {error}")

    def wait(self, numbers: list[int]) -> None:
        self.it().net.run_until(lambda: not any(n in self.running for n in numbers), 70.0)
        assert not any(number in self.running for number in numbers), "it hangs"

    # -- what is told --

    def name_of(self, peer: str) -> str:
        return self.names[int(peer, 16)]

    def said(self, sender: str, to: str, message: Message) -> None:
        kind = words(type(message))
        if kind in self.hidden or not (isinstance(message, SHOWN) or kind in self.extra):
            return
        if not to:
            return
        line = f"{self.name_of(sender)} -> {self.name_of(to)}  {self.show(message)}"
        self.lines.append(line)

    def show(self, message: Message) -> str:
        text = [words(type(message))]
        if isinstance(message, GroupMessage):
            text += [f"{message.call}", show_generation(message.generation)]
        if isinstance(message, CallAsk):
            text.append(message.question.selector)
        if isinstance(message, (CallRecord, CallDecided)):
            text.append(show_publication(message.decision.publication))
        if isinstance(message, CallDecided) and message.sources:
            text.append(f"at {' '.join(self.name_of(s.peer) for s in message.sources)}")
        if isinstance(message, CallRecorded) and message.floor != (-1, -1):
            text.append(f"floor v{message.floor[1]}")
        if isinstance(message, (Propose, Formed)):
            members = "".join(self.name_of(m.peer) for m in message.record.members)
            text += [show_generation(message.record.generation), members]
        if isinstance(message, Vote):
            text += [show_generation(message.generation), "yes" if message.accepted else "no"]
        if isinstance(message, SlotChallenge):
            text += [f"{message.slot.group.replica}/{message.slot.shard}", f"{message.counter}"]
        if isinstance(message, SlotAnswer):
            text.append("holds" if message.holds else "yields")
        if isinstance(message, KeepAsk):
            text.append(show_publication(message.publication))
        if isinstance(message, KeepAnswer):
            text.append("yes" if message.yes else "working" if message.working else "no")
        key = getattr(message, "key", None)
        if key is not None:
            text.append(f"{key.kind} {key.part}".strip())
        if hasattr(message, "registers"):
            names = sorted(r.name.partition(":")[0] for r in message.registers)
            text.append(f"[{', '.join(names)}]")
        return " ".join(text)

    def listen(self, index: int) -> None:
        """Tell what this peer writes, and what came of it."""
        node: Node = self.it().nodes[index]
        name, records = self.names[index], node.records
        write, mark, look = records.write, records.mark, records.write_and_look

        def writing(
            now: float, key: Any, register: str, generation: int, value: Any, then: Any
        ) -> int:
            if isinstance(value, HolderRecord):
                return write(now, key, register, generation, value, then)
            what = f"{name} writes {register} = {show_value(value)}"
            return write(now, key, register, generation, value, self.telling(what, then))

        def marking(now: float, key: Any, value: Any, then: Any) -> int:
            if not isinstance(value, WholeMark):
                return mark(now, key, value, then)
            what = f"{name} marks {show_publication(value.publication)} whole"
            return mark(now, key, value, self.telling(what, then))

        def looking(
            now: float,
            key: Any,
            register: str,
            generation: int,
            value: Any,
            then: Any,
            *,
            agreed: bool = False,
        ) -> int:
            what = f"{name} writes {register} = {show_value(value)}"
            told = self.telling(what, then)
            return look(now, key, register, generation, value, told, agreed=agreed)

        records.write_and_look = looking  # type: ignore[method-assign]
        records.write = writing  # type: ignore[method-assign]
        records.mark = marking  # type: ignore[method-assign]

    def telling(self, what: str, then: Callable[..., None]) -> Callable[..., None]:
        def told(now: float, refused: Refused | None, *seen: object) -> None:
            self.lines.append(f"{what}{f': refused, {refused.reason}' if refused else ''}")
            then(now, refused, *seen)

        return told


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_the_story_goes_as_it_is_told(story: Path) -> None:
    retell(story, World().play)


def test_there_are_stories() -> None:
    assert {story.stem for story in STORIES} >= {
        "election",
        "fenced_leader",
        "void_and_retry",
        "retention_race",
        "ring_change",
    }
