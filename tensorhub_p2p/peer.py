"""`Peer`: this process as a member of the cluster. It joins, owns handles, closes everything."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from tensorhub_p2p.config import Config, ConfigError
from tensorhub_p2p.errors import PeerClosed, RetentionLost, TensorHubError, Timeout
from tensorhub_p2p.explaining import explain
from tensorhub_p2p.handle import ShardHandle
from tensorhub_p2p.options import (
    PeerOptions,
    check_flag,
    check_timeout,
    checked_integer,
    checked_name,
    resolve_options,
)
from tensorhub_p2p.protocol.identity import Group, Slot
from tensorhub_p2p.protocol.membership.members import GONE, MemberView
from tensorhub_p2p.protocol.messages import Retain, ZoneSummary
from tensorhub_p2p.protocol.shards.verbs import VersionSummary
from tensorhub_p2p.results import HandleState, Member, Pull, VersionInfo, ZoneInfo
from tensorhub_p2p.retains import checked_retain
from tensorhub_p2p.runtime.driver import Driver
from tensorhub_p2p.runtime.joining import check_seeds, join

_log = logging.getLogger(__name__)

MAX_SHARDS = 65_536


class Peer:
    """A running member. Use it as a context manager, or call `close()`.

    Options that are not given come from `THUB_*` environment variables (`THUB_SEEDS` is
    comma-separated), then from the defaults.

    cluster       name of the cluster; peers of different clusters never talk
    seeds         addresses to join through, "host:port" or "[v6]:port"; none: a cluster of one
    zone          the datacenter
    bind          control address, "127.0.0.1:0" by default; without a secret only loopback
    advertise     the address others reach this peer by, if it isn't the bound one (NAT)
    data_bind     address of the tcp transport, and host of ucx's port; by default the host of
                  `bind` and a free port
    secret        shared secret: encrypts and admits (`tensorhub-p2p keygen` makes one)
    insecure      allow a public `bind` without a secret
    name          for people; the host's name and the process id by default
    host, rack    labels of the machine and the rack, for choosing near sources
    transports    what is used, in order of preference; by default cma and tcp, and where there is
                  an RDMA device and no secret cma, nixl, ucx, tcp
    offload_limit bytes of host memory for versions that are retained and held nowhere else;
                  a quarter of what this process may use by default, 0 for none
    join_timeout  seconds until `JoinError`

    Raises JoinError, AuthenticationError, ConfigError.
    """

    def __init__(
        self,
        cluster: str | None = None,
        seeds: Sequence[str] | None = None,
        zone: str | None = None,
        *,
        bind: str | None = None,
        advertise: str | None = None,
        data_bind: str | None = None,
        secret: str | None = None,
        insecure: bool | None = None,
        name: str | None = None,
        host: str | None = None,
        rack: str | None = None,
        transports: Sequence[str] | None = None,
        offload_limit: int | None = None,
        join_timeout: float | None = None,
        config: Config | None = None,
    ) -> None:
        self.options = resolve_options(
            cluster,
            seeds,
            zone,
            bind,
            advertise,
            data_bind,
            secret,
            insecure,
            name,
            host,
            rack,
            transports,
            offload_limit,
            join_timeout,
        )
        self._handles: list[ShardHandle] = []
        self._closing = threading.RLock()
        """A signal handler may close the peer in the middle of anything that its thread does."""
        self._closed = False
        check_seeds(self.options.bind, self.options.advertise, self.options.seeds)
        self._driver = _start(self.options, config or Config())
        try:
            join(
                self._driver,
                self.options.cluster,
                self.options.seeds,
                self.options.join_timeout,
            )
        except BaseException:
            self._driver.close(timeout=1.0)
            raise

    # --- questions -----------------------------------------------------------------------

    @property
    def peer_id(self) -> str:
        """This process's identity: 16 hex digits, new for every start."""
        return self._driver.peer_id

    @property
    def address(self) -> str:
        """The control address to give to others as a seed."""
        return self._driver.info.addresses[0]

    def members(self, everyone: bool = False) -> list[Member]:
        """Who is in this peer's zone, itself included; `everyone` lists the dead and left too."""
        views: tuple[MemberView, ...] = self._driver.ask(
            lambda _now: self._driver.node.zones.members()
        )
        return [_member(view) for view in views if everyone or view.status not in GONE]

    def zones(self) -> list[ZoneInfo]:
        """The zones of the cluster, by name, each as its gateways describe it."""
        summaries: tuple[ZoneSummary, ...] = self._driver.ask(
            lambda _now: self._driver.node.zones.zones()
        )
        return sorted(map(_zone, summaries), key=lambda zone: zone.name)

    def versions(self, model: str, timeout: float = 10.0) -> list[VersionInfo]:
        """Which versions of a model somebody holds, newest first. Raises Timeout after `timeout`
        seconds, PeerClosed.
        """
        node = self._driver.node
        check_timeout(timeout)
        running = self._driver.verb(
            timeout, lambda now, number, deadline: node.versions(now, number, deadline, model)
        )
        found: tuple[VersionSummary, ...] = running.future.result()
        return [VersionInfo(v.epoch, v.version, v.whole, v.holders, v.zones) for v in found]

    def explain(self, pull: Pull) -> str:
        """In words: which sources a pull considered, what each gave, and why others did not."""
        return explain(pull)

    # --- handles -------------------------------------------------------------------------

    def open(
        self,
        model: str,
        *,
        replica: str | None = None,
        shard: int = 0,
        num_shards: int = 1,
        retain: Retain | None = None,
        spot: bool = False,
        timeout: float = 60.0,
    ) -> ShardHandle:
        """Claim shard `shard` of `num_shards` of a replica of `model`.

        Without `replica` a unique name is made (for a single shard only). Returns once the
        slot is claimed; the group forms in its first verb, so one thread may open several
        shards. A restart under a fixed name waits until its predecessor is declared dead. Raises
        SlotTaken if a live peer holds the slot, Timeout after `timeout` seconds, ConfigError for a
        name or number that can't be meant, PeerClosed.

        `retain`, made by `newest(k)` or `versions(...)`, keeps versions of the model somewhere
        in the cluster, whoever unpublishes them, until this handle is closed. `spot=True`
        says that this process may vanish at any moment: others copy from here, but what it
        holds never counts as a safe copy.
        """
        wanted = checked_retain(retain)
        check_flag("spot", spot)
        num_shards = checked_integer("num_shards", num_shards, 1, MAX_SHARDS)
        shard = checked_integer("shard", shard, 0, num_shards - 1)
        check_timeout(timeout)
        checked_name("model", model)
        if replica is None and num_shards > 1:
            raise ConfigError(
                f"replica: num_shards = {num_shards} needs a name, the same one in all processes "
                "of the replica"
            )
        name = checked_name("replica", replica or f"{self.options.name}-{secrets.token_hex(4)}")
        slot = Slot(Group(model, name), shard)
        handle = ShardHandle(self._driver, slot, num_shards, spot=spot, retain=wanted)
        try:
            handle._claim(timeout, elastic=replica is None)
        except Timeout:
            if self._closed:
                raise PeerClosed(f"open of {slot}: the peer was closed meanwhile") from None
            raise
        with self._closing:
            if not self._closed:
                open_now = [h for h in self._handles if h.state is not HandleState.CLOSED]
                self._handles = [*open_now, handle]
                return handle
        handle.close(timeout)  # whoever closed the peer did not know of it
        raise PeerClosed(f"open of {slot}: the peer was closed meanwhile")

    # --- the end -------------------------------------------------------------------------

    def close(self, timeout: float = 30.0) -> None:
        """Close all handles, leave the cluster and free everything; again: nothing happens.

        It takes `timeout` seconds at most.

        What others retain and is held only here is handed to other peers first. By its
        deadline the peer is closed in any case, and RetentionLost is raised if
        something that is retained was lost. Waits of other threads end with an error. A forked
        child's `close` does nothing.
        """
        check_timeout(timeout)
        if self._driver.foreign:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = self._driver.closing = True
        deadline = time.monotonic() + timeout
        driver = self._driver
        lost: list[str] = []
        try:
            lost = self._hand_over(deadline)
            driver.ask(lambda now: driver.node.leave(now))
        finally:
            driver.close(max(0.5, deadline - time.monotonic()))
        if lost:
            raise RetentionLost("; ".join(lost))

    def _hand_over(self, deadline: float) -> list[str]:
        """Close all handles side by side, and have others keep what is kept; what was lost."""
        driver, timeout = self._driver, max(0.1, deadline - time.monotonic())
        leaving = driver.verb(timeout, driver.node.leave_well)
        closing = [handle for handle in self._handles if handle._may_close()]
        started = [(handle, handle._start_close(timeout)) for handle in closing]
        lost: list[str] = []
        for handle, running in started:
            try:
                handle._await_close(running)
            except RetentionLost as error:
                lost.append(str(error))
            finally:
                handle._let_go(deadline)
        lost += leaving.future.result()
        return lost

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RetentionLost as lost:
            if error is None:
                raise
            _log.error("%s", lost)  # the error that ends the block is raised

    def __repr__(self) -> str:
        if self._closed:
            return f"<Peer {self.peer_id} closed>"
        alone = "" if self._driver.joined.is_set() else ", started as a cluster of one"
        return f"<Peer {self.peer_id} at {self.address} in {self.options.cluster!r}{alone}>"


def _start(options: PeerOptions, config: Config) -> Driver:
    return Driver(
        cluster=options.cluster,
        zone=options.zone,
        bind=options.bind,
        advertise=options.advertise,
        data_bind=options.data_bind,
        secret=options.secret,
        insecure=options.insecure,
        name=options.name,
        host=options.host,
        rack=options.rack,
        transports=options.transports,
        offload_limit=options.offload_limit,
        config=config,
    )


def _zone(summary: ZoneSummary) -> ZoneInfo:
    gateways = tuple(address for info in summary.gateways for address in info.addresses[:1])
    newest = {hint.model: (hint.epoch, hint.version) for hint in summary.newest}
    return ZoneInfo(summary.zone, summary.members, gateways, newest)


def _member(view: MemberView) -> Member:
    info = view.info
    return Member(info.peer_id, info.name, info.addresses[0], info.zone, view.status.name.lower())


def close_on_sigterm(peer: Peer, timeout: float = 30.0) -> None:
    """Have SIGTERM close this peer, then do what it did before. Call it in the main thread.

    `timeout` is that of `Peer.close`: what others retain is handed over, so give it less than
    the time until SIGKILL follows. Waits in the main thread end with a StateError meanwhile.
    What was lost is logged. Raises ValueError in any other thread.
    """
    check_timeout(timeout)
    before = signal.getsignal(signal.SIGTERM)
    closing = threading.Event()
    closed = threading.Event()

    def close() -> None:
        # On a thread of its own: the main thread may be anywhere, in the middle of a verb too.
        try:
            peer.close(timeout)
        except TensorHubError:
            _log.exception("closing on SIGTERM")
        finally:
            closed.set()
            os.kill(os.getpid(), signal.SIGTERM)

    def handler(number: int, frame: FrameType | None) -> Any:
        if not closing.is_set():
            closing.set()
            threading.Thread(target=close, name="tensorhub-sigterm").start()
        elif closed.is_set():
            signal.signal(number, before)
            if callable(before):
                return before(number, frame)
            signal.raise_signal(number)
        return None

    signal.signal(signal.SIGTERM, handler)
