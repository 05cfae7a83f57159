"""One peer, running: the node on its control thread, its sockets, transports and digests.

Rules of this file. It builds the parts of a running peer, starts and stops them in the
right order, and carries events from the control thread to whoever waits: futures of
verbs, inboxes of pulls, digest jobs. It decides nothing; what a verb means is the node's
business, what a handle may do handle.py's.

What dies when: `close` ends the pulls first (their inboxes hear of it), then the control
thread (which flushes its goodbyes), then digests, kept and prefetched copies, and transports.
Every future that is still open ends with PeerClosed.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event as Flag
from typing import Any

from tensorhub_p2p.config import Config, ConfigError
from tensorhub_p2p.errors import StateError
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo, Publication, Slot
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership.swim_events import (
    Joined,
    Look,
    MemberChanged,
    MemberForgotten,
    SeedIsSelf,
    Unheard,
)
from tensorhub_p2p.protocol.messages import Message
from tensorhub_p2p.protocol.node import Node
from tensorhub_p2p.protocol.pulls.pages import KnownLayouts
from tensorhub_p2p.protocol.pulls.serving import DigestsWanted
from tensorhub_p2p.protocol.shards.verbs import (
    AdoptWanted,
    Done,
    Failed,
    HoldersChanged,
    KeepFreed,
    OffloadWanted,
    PrefetchGone,
    PublicationLost,
    PullMessage,
    StopDigests,
)
from tensorhub_p2p.runtime.addresses import parse
from tensorhub_p2p.runtime.adopting import Adoptions
from tensorhub_p2p.runtime.control import ControlThread
from tensorhub_p2p.runtime.digests import Batch, PublishedDigests
from tensorhub_p2p.runtime.forkguard import ForkGuard
from tensorhub_p2p.runtime.links import Links
from tensorhub_p2p.runtime.monitor import Fact, LinkFact
from tensorhub_p2p.runtime.offloading import Offloads
from tensorhub_p2p.runtime.prefetching import Prefetches
from tensorhub_p2p.runtime.verbs import Running, RunningVerbs, Start, Then
from tensorhub_p2p.transfer.choosing import Choices, Facts
from tensorhub_p2p.transfer.credentials import Credentials
from tensorhub_p2p.transfer.huge_pages import HugePages
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.transports.base import Transport
from tensorhub_p2p.transfer.transports.cma import CmaTransport, host_id
from tensorhub_p2p.transfer.transports.tcp import TcpTransport

_logger = logging.getLogger(__name__)

UNHEARD_COUNT = 5
UNHEARD_WITHIN = 15.0
"""So many probes, within so many seconds, unanswered by those who do send: it is warned of."""


def check_rules(config: Config, transports: Sequence[str]) -> None:
    """Raises ConfigError for a rule for links with a transport that the peer doesn't use."""
    for rule in config.links:
        foreign = [name for name in rule.transports if name not in transports]
        if foreign:
            raise ConfigError(
                f"Config.links: {rule} names {', '.join(foreign)}, but this peer's transports "
                f"are {', '.join(transports)}: name them there, too"
            )


class Driver:
    """One running peer. Thread-safe, but for what says otherwise."""

    def __init__(
        self,
        *,
        cluster: str,
        zone: str,
        bind: str,
        advertise: str | None,
        data_bind: str | None,
        secret: str | None,
        insecure: bool,
        name: str,
        host: str,
        rack: str,
        transports: Sequence[str],
        offload_limit: int,
        config: Config,
    ) -> None:
        self.config = config
        check_rules(config, transports)
        self.peer_id = PeerId(secrets.token_hex(8))
        self.links = Links(
            self.peer_id,
            cluster,
            zone,
            bind=bind,
            advertise=advertise,
            secret=secret,
            insecure=insecure,
            config=config.wire,
            lookup=lambda peer: self.node.info_of(peer),
        )
        self.transports: dict[str, Transport] = {}
        try:
            self._make_transports(transports, bind, data_bind, secret, host)
            self._check_usable()
        except BaseException:
            for transport in self.transports.values():
                transport.close()
            self.links.close(0)
            raise
        self.choices = Choices(transports, config.links, self._facts, config.pull.failure_memory)
        self.info = self._describe(name, zone, host, rack)
        rng = random.Random(secrets.randbits(64))
        self.node = Node(self.info, config, rng, offload_limit=offload_limit)
        self._verbs = RunningVerbs()
        self.control = ControlThread(
            self.node,
            self.links,
            self._on_event,
            self._on_fact,
            self._verbs.close,
            self.node.evidence,
        )
        self._keep_books()
        self._make_workers()
        self._guard = ForkGuard("this peer", (self.transports, self.offloads, self.prefetches))
        self.control.start()

    def _describe(self, name: str, zone: str, host: str, rack: str) -> PeerInfo:
        """What this peer tells others about itself."""
        tcp = self.transports.get("tcp")
        return PeerInfo(
            peer_id=self.peer_id,
            name=name,
            zone=zone,
            addresses=self.links.addresses,
            data_addresses=tcp.addresses if isinstance(tcp, TcpTransport) else (),
            host=host_id(host),
            rack=rack,
        )

    def _keep_books(self) -> None:
        """What the control thread notes for other threads."""
        self.joined = Flag()
        """A seed answered."""
        self.own_seeds: set[str] = set()
        """Seed addresses that lead back here."""
        self.refused: dict[str, LinkFact] = {}
        """Addresses that refuse the handshake, with how often in a row."""
        self.news = Flag()
        """Set whenever one of the three above changed."""
        self._infos: dict[PeerId, PeerInfo] = {self.peer_id: self.info}
        """What members told about themselves; read by the threads of pulls."""
        self._pulls: dict[str, SimpleQueue[object]] = {}
        self._follows: dict[int, SimpleQueue[object]] = {}
        self._unheard: deque[float] = deque(maxlen=UNHEARD_COUNT)
        """When probes were unanswered by somebody who did send."""
        self._warn_from = float("-inf")
        self.lost: dict[Slot, Publication] = {}
        """By slot: the last publication there that was aborted behind its handle's back."""
        self.regions: dict[Slot, Region] = {}
        """By slot: the memory that it serves, or is about to, in the publisher's order."""
        self.layouts = KnownLayouts()
        """Those of what was pulled, where they are not the handles' own."""
        self.closing = False
        """The peer is being closed: its handles are not to be used any more."""

    def _make_workers(self) -> None:
        """Those who work for the node on other threads, and how they tell it what they did."""
        self.digests = PublishedDigests(Batch(self.control.post, self.node.digested))
        self.learnt = Batch(self.control.post, self.node.digested)
        """Digests that pulls learn, to be served on."""
        self.verified = Batch(self.control.post, self.node.verified)
        """Chunks that pulls verified, to be served on."""
        self.offloads = Offloads(self.transports, self.control.post, self.node)
        self.adoptions = Adoptions(self, self.offloads)
        self.prefetches = Prefetches(self, self.config.pull.prefetch_limit)
        self.huge_pages = HugePages(self.config.memory)

    def _check_usable(self) -> None:
        """Say which transports were asked for and can't work here, and why.

        Raises ConfigError if none of them can: no byte would ever move.
        """
        reasons = {name: transport.unavailable() for name, transport in self.transports.items()}
        usable = [name for name, reason in reasons.items() if reason is None]
        if not usable:
            told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ConfigError(
                f"transports = {list(reasons)}: none of them can be used here ({told}); "
                "name tcp, which always can, or leave the choice out"
            )
        for name, reason in reasons.items():
            if reason is not None:
                _logger.warning(
                    "transport %s can't be used by peer %s: %s; it has %s",
                    name,
                    self.peer_id,
                    reason,
                    ", ".join(usable),
                )

    def _make_transports(
        self,
        names: Sequence[str],
        bind: str,
        data_bind: str | None,
        secret: str | None,
        host: str,
    ) -> None:
        for name in names:
            self.transports[name] = self._make_transport(name, bind, data_bind, secret, host)

    def _make_transport(
        self, name: str, bind: str, data_bind: str | None, secret: str | None, host: str
    ) -> Transport:
        """One that is not used is not imported either."""
        silence = self.config.pull.source_timeout
        if name == "cma":
            return CmaTransport(host)
        if name == "nixl":
            from tensorhub_p2p.transfer.transports.nixl import NixlTransport

            return NixlTransport(host, config=self.config.nixl, silence=silence)
        if name == "ucx":
            from tensorhub_p2p.transfer.transports.ucx import UcxTransport

            return UcxTransport(
                parse(data_bind or bind, 0).host,
                sealed=secret is not None,
                config=self.config.ucx,
                silence=silence,
            )
        return self._make_tcp(bind, data_bind, secret)

    def _make_tcp(self, bind: str, data_bind: str | None, secret: str | None) -> TcpTransport:
        where = parse(data_bind, 0) if data_bind else parse(bind, 0)._replace(port=0)
        hosts = [str(parse(address)._replace(port=0)) for address in self.links.addresses]
        return TcpTransport(
            str(where),
            advertise=[text.rpartition(":")[0] for text in hosts],
            credentials=Credentials.from_secret(secret) if secret else None,
            config=self.config.tcp,
            silence=self.config.pull.source_timeout,
        )

    # --- whose it is ---------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Not closed, and this process's own."""
        return self.control.running and not self.foreign

    @property
    def foreign(self) -> bool:
        """This is a forked child of the process that started the peer."""
        return self._guard.foreign

    def check_process(self) -> None:
        """Raises PeerClosed in a forked child."""
        self._guard.check()

    # --- verbs and questions -------------------------------------------------------------

    def verb(self, timeout: float, start: Start, then: Then | None = None) -> Running:
        """Run a verb of the node: `start(now, number, deadline)` begins it.

        `then` goes on from its result, on the control thread.
        """
        running = self.expect(then)
        self.hand_over(running, timeout, start)
        return running

    def expect(self, then: Then | None = None) -> Running:
        """A verb that will be handed over."""
        return self._verbs.expect(then)

    def hand_over(self, running: Running, timeout: float, start: Start) -> None:
        try:
            self.control.post(lambda now: self._verbs.begin(now, timeout, start, running.number))
        except BaseException:
            self._verbs.forget(running.number)
            raise

    def run(self, slot: Slot, timeout: float, start: Start, then: Then | None = None) -> Any:
        """Run a verb of this slot to its end; a wait that is interrupted (Ctrl-C) ends it too.

        `then` goes on from its result, on the control thread.
        """
        running = self.expect(then)
        # A signal may come between any two steps, also when the verb was handed over already.
        try:
            self.hand_over(running, timeout, start)
            return running.future.result()
        except BaseException:
            self._given_up(slot, running)
            raise

    def wait(self, slot: Slot, running: Running) -> Any:
        """The end of a verb of this slot that was begun; an interrupted wait ends it too."""
        try:
            return running.future.result()
        except BaseException:
            self._given_up(slot, running)
            raise

    def _given_up(self, slot: Slot, running: Running) -> None:
        if not running.future.done():
            self.interrupt(slot, running)

    def interrupt(self, slot: Slot, running: Running) -> None:
        """End this verb of the slot, if it is still under way: nobody waits for it any more."""
        if self.running:
            self.control.post(lambda now: self.node.interrupt(now, slot, running.number))

    def ask(self, question: Callable[[float], Any]) -> Any:
        """Run `question(now)` on the control thread and wait for what it returns."""
        return self.control.call(question).result()

    def send(self, to: PeerId, message: Message) -> None:
        """A message of a pull; from any thread."""
        self.control.post(lambda now: self._send(now, to, message))

    def _send(self, now: float, to: PeerId, message: Message) -> None:
        if to == self.peer_id:
            self.node.receive(now, to, message)
        else:
            self.links.send(to, message)

    def locality(self, peer: PeerId) -> int:
        """How far a peer is: 0 same host, 1 same rack, 2 same zone, 3 farther or unknown."""
        info = self._infos.get(peer)
        if info is None or info.zone != self.info.zone:
            return 3
        if info.host == self.info.host:
            return 0
        return 1 if info.rack and info.rack == self.info.rack else 2

    def _facts(self, peer: PeerId) -> Facts:
        """What rules for links look at."""
        info = self._infos.get(peer)
        if info is None:
            return Facts()
        label = info.host.split("/", 2)[-1]
        return Facts(info.name, info.zone, label, self.locality(peer))

    def name(self, peer: PeerId) -> str:
        """A peer's name, for people; "" if it was never met."""
        info = self._infos.get(peer)
        return info.name if info is not None else ""

    # --- pulls ---------------------------------------------------------------------------

    def open_inbox(self, pull: str) -> SimpleQueue[object]:
        """Where the messages of this pull arrive, as (sender, message), and membership's news."""
        inbox: SimpleQueue[object] = SimpleQueue()
        self._pulls[pull] = inbox
        return inbox

    def close_inbox(self, pull: str) -> None:
        self._pulls.pop(pull, None)

    def follow(
        self, inbox: SimpleQueue[object], start: Callable[[float], int]
    ) -> Callable[[], None]:
        """Have `HoldersChanged` of a follow put into the inbox; `start` begins it.

        Returns what ends it. Nobody waits for its begin: the inbox tells.
        """
        number = 0

        def begin(now: float) -> None:
            nonlocal number
            number = start(now)
            self._follows[number] = inbox

        def end(now: float) -> None:
            self._follows.pop(number, None)
            self.node.unfollow(now, number)

        self.control.post(begin)
        return lambda: self.control.post(end)

    # --- on the control thread -----------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if isinstance(event, (Done, Failed)):
            self._verbs.end(time.monotonic(), event)
        elif isinstance(event, PullMessage):
            inbox = self._pulls.get(event.pull)
            if inbox is not None:
                inbox.put((event.sender, event.message))
        elif isinstance(event, HoldersChanged):
            inbox = self._follows.get(event.follow)
            if inbox is not None:
                inbox.put(event)
        elif isinstance(event, DigestsWanted):
            self.digests.prefer(event.slot, event.publication, event.chunks)
        elif isinstance(event, PublicationLost):
            self.lost[event.slot] = event.publication
        elif isinstance(event, StopDigests):
            self.digests.stop(event.slot, event.publication)
            self.offloads.stop(event.slot, event.publication)
        elif isinstance(event, OffloadWanted):
            self._offload(event)
        elif isinstance(event, AdoptWanted):
            self.adoptions.start(event.keep, event.publication)
        elif isinstance(event, KeepFreed):
            if not self.adoptions.take_back(event.keep):
                self.offloads.free(event.keep)
        elif isinstance(event, PrefetchGone):
            self.prefetches.gone(event.slot)
        elif isinstance(event, MemberChanged):
            self._member_changed(event)
        elif isinstance(event, MemberForgotten):
            self._infos.pop(event.peer, None)
            self.links.forget(event.peer)
        elif isinstance(event, Look):
            self.links.look(event.peer)
        elif isinstance(event, Unheard):
            self._warn_unheard(event)
        elif isinstance(event, Joined):
            self.joined.set()
            self.news.set()
        elif isinstance(event, SeedIsSelf):
            self.own_seeds.add(event.address)
            self.news.set()

    def _offload(self, event: OffloadWanted) -> None:
        region = self.regions.get(event.slot)
        if region is not None:
            self.offloads.copy(event.slot, event.keep, event.publication, region)
        else:
            self.offloads.failed(event.keep, StateError(f"{event.slot} holds nothing any more"))

    def _member_changed(self, event: MemberChanged) -> None:
        self.links.learn(event.member.info)
        self._infos[event.member.peer_id] = event.member.info
        if not event.member.is_reachable:
            for inbox in list(self._pulls.values()):
                inbox.put(event.member.peer_id)
        self.links.watch(self.node.zones.watched)

    def _warn_unheard(self, event: Unheard) -> None:
        """Once in a while, if it goes on: a peer that is busy may seem so for a moment.

        Whomever it is about: mostly it is this machine's trouble.
        """
        now = time.monotonic()
        self._unheard.append(now)
        if len(self._unheard) < UNHEARD_COUNT or now - self._unheard[0] > UNHEARD_WITHIN:
            return
        if now < self._warn_from:
            return
        self._warn_from = now + self.config.wire.unheard_log_interval
        info = self._infos.get(event.peer)
        _logger.warning(
            "what peer %s sends to %s seems to get lost: messages come from there, but no "
            "answers. Check that this machine can reach %s (firewalls; the `advertise` of that "
            "peer), and that this peer, at %s, can be reached from there",
            self.peer_id,
            self.node.liveness.name(event.peer),
            ", ".join(info.addresses) if info is not None else "its address",
            ", ".join(self.info.addresses),
        )

    def _on_fact(self, now: float, fact: LinkFact) -> None:
        if fact.fact is Fact.REFUSED:
            for address in fact.names:
                self.refused[address] = fact
            self.news.set()

    # --- the end -------------------------------------------------------------------------

    def close(self, timeout: float) -> None:
        """End everything. Handles are closed, and `leave` was said, before."""
        if self.foreign:
            return
        for inbox in list(self._pulls.values()):
            inbox.put(None)
        self.control.stop(timeout)
        self.huge_pages.close()
        self.digests.close()
        self.adoptions.close()
        self.prefetches.close()
        self.offloads.close()
        for transport in self.transports.values():
            transport.close()
