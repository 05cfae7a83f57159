"""Every interval, limit and fan-out, with its unit and what it is for.

All of it is frozen and checked when it is made, before any socket opens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

TRANSPORTS = ("cma", "nixl", "ucx", "tcp")
"""All transports, in the order of preference."""


class ConfigError(ValueError):
    """A config value that can't work; the message names the field."""


@dataclass(frozen=True)
class Checked:
    """Base of all config classes: numbers are finite and positive unless said otherwise."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                minimum = f.metadata.get("minimum", None)
                if minimum is None and not 0 < value < float("inf"):
                    raise ConfigError(f"{type(self).__name__}.{f.name} = {value}: must be positive")
                if minimum is not None and not minimum <= value < float("inf"):
                    raise ConfigError(
                        f"{type(self).__name__}.{f.name} = {value}: must be at least {minimum}"
                    )
                maximum = f.metadata.get("maximum", None)
                if maximum is not None and value > maximum:
                    raise ConfigError(
                        f"{type(self).__name__}.{f.name} = {value}: must be at most {maximum}"
                    )


@dataclass(frozen=True)
class SwimConfig(Checked):
    """Membership inside a zone. Sources: SWIM §3–4, Lifeguard §3, memberlist's LAN defaults."""

    probe_interval: float = 1.0
    """Seconds between two probes by one peer."""
    probe_timeout: float = 0.5
    """Seconds until an unanswered direct probe goes indirect; below `probe_interval`."""
    indirect_probes: int = 3
    """Relays asked when a direct probe got no answer (SWIM's k)."""
    suspicion_multiplier: float = 4.0
    """Shortest suspicion = this × max(1, log10 N) × probe_interval, in seconds."""
    suspicion_max_multiplier: float = 6.0
    """Longest suspicion = this × the shortest; confirmations shorten it (Lifeguard §3.2)."""
    gossip_interval: float = 0.2
    """Seconds between two rounds of gossip."""
    gossip_nodes: int = 3
    """Peers gossiped to in a round."""
    retransmit_multiplier: int = 6
    """A rumour is sent this × ⌈log10(N+1)⌉ times, so that hardly ever a peer misses one."""
    push_pull_interval: float = 30.0
    """Seconds between two comparisons of views with a random member, up to 32 members; above,
    it grows by as much again with each doubling (memberlist's scaling)."""
    max_rumour_bytes: int = 1200
    """Bytes of rumours on one message."""
    mismatch_interval: float = 2.0
    """Shortest time, in seconds, between two full exchanges because views were seen to differ."""
    forget_dead_after: float = 7200.0
    """Seconds during which the dead are remembered and re-dialled, so that halves rejoin."""
    suspicion_confirmations: int = 3
    """Independent confirmations that bring a suspicion to its shortest (Lifeguard's K)."""
    refused_suspicion: float = 0.25
    """Seconds left to refute once a re-dial was refused: the process is almost surely gone."""
    unreachable_suspicion: float = 1.5
    """Seconds left to refute once a watch was lost and nothing answered its re-dials."""
    unresponsive_limit: float = 60.0
    """Seconds for which sockets that answer keep a silent member from being declared dead."""
    watched_neighbours: int = 3
    """Members to whose sockets a peer keeps a standing connection, to see them end."""
    max_local_health: int = 8
    """Timeouts of a peer that is slow itself grow up to this many times (Lifeguard's S)."""
    doubt_limit: float = 30.0
    """Seconds for which a peer that hears nobody at all holds its verdicts: it may be the one
    that is cut off."""
    gossip_to_dead_for: float = 30.0
    """Seconds for which a member declared dead still gets gossip, to learn of it and refute."""
    leave_fanout: int = 8
    """Members told at once when a peer leaves."""
    join_retry: float = 0.5
    """Seconds between two rounds over all seeds until one answers."""
    redial_interval: float = 5.0
    """Mean seconds between two tries to reach a missing seed and a dead member (jittered)."""
    pause_after: float = 1.0
    """Seconds by which a wake-up must be late to count as an own pause, which holds verdicts."""
    max_hint_bytes: int = 600
    """Bytes of version hints on one message; apart from rumours, so that neither starves."""
    max_summary_bytes: int = 2400
    """Bytes of zone summaries on one message."""
    max_zones: int = 256
    """Zones whose summary is remembered; those of further ones are dropped."""
    max_hinted_models: int = 4096
    """Models whose newest version is remembered; hints of further ones are dropped."""
    max_members: int = 20_000
    """Members remembered, dead ones included; further newcomers are ignored."""
    max_relayed_probes: int = 256
    """Probes relayed for others at a time; further requests are ignored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probe_timeout >= self.probe_interval:
            raise ConfigError(
                f"SwimConfig.probe_timeout = {self.probe_timeout}: must be below "
                f"probe_interval = {self.probe_interval}"
            )


WIDE_AREA = SwimConfig(
    probe_interval=5.0,
    probe_timeout=3.0,
    suspicion_multiplier=6.0,
    gossip_interval=0.5,
    gossip_nodes=4,
    push_pull_interval=60.0,
    gossip_to_dead_for=60.0,
    mismatch_interval=5.0,
    refused_suspicion=2.0,
    unreachable_suspicion=5.0,
    join_retry=2.0,
)
"""Membership among the gateways of all zones. Source: memberlist's WAN defaults; the times
that it doesn't have are as many round trips of a far network as the LAN's are of a near one."""


@dataclass(frozen=True)
class ZonesConfig(Checked):
    """How zones speak with each other."""

    gateways: int = 2
    """Peers that speak for a zone at a time."""
    named: int = 4
    """Peers named in a zone's summary: its gateways, then those next in line, so that others
    still find the zone when all its gateways die at once."""
    settle_seconds: float = 10.0
    """Seconds for which a member must have been alive before it becomes a gateway, if there
    are others that were."""
    linger_seconds: float = 5.0
    """Seconds after which a gateway that others have replaced stops being one."""
    review_interval: float = 1.0
    """Seconds after which a gateway looks again who the gateways are, changes or not."""
    summary_interval: float = 1.0
    """Shortest time, in seconds, between two summaries that a zone writes."""
    takeover_seconds: float = 5.0
    """Seconds for which the summary of another writer that still lives is left as it is."""
    alone_after: float = 3.0
    """Seconds for which a peer that knows no member of its zone looks for one before it starts
    the zone itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gateways <= self.named <= 8:
            raise ConfigError(
                f"ZonesConfig.named = {self.named}: must be from gateways = {self.gateways} to 8"
            )


@dataclass(frozen=True)
class DirectoryConfig(Checked):
    """The hash ring and its quorums."""

    replicas: int = 3
    """Owners of a key, at most (n); W = R = ⌊n/2⌋ + 1."""
    virtual_nodes: int = 64
    """Points of one member on the ring."""
    retry_interval: float = 0.25
    """Seconds until an unanswered owner is asked again."""
    read_patience: float = 0.05
    """Seconds until a read is asked of more owners than have to answer it."""
    watch_seconds: float = 10.0
    """How long an owner remembers a watcher that does not ask again."""
    repair_interval: float = 10.0
    """Mean seconds between two rounds in which a writer re-checks its registers (jittered)."""
    max_registers: int = 200_000
    """Registers that one owner holds; beyond it new ones are refused."""
    max_key_registers: int = 20_000
    """Registers under one key, as they travel in one message; beyond it new ones are refused."""
    max_keys: int = 100_000
    """Keys that one owner knows of, empty ones too; beyond it requests for others wait."""
    max_watchers: int = 4096
    """Watchers of one key; beyond it newcomers are not told of changes."""
    settle_seconds: float = 0.5
    """How long an owner whose view differs from another's takes no requests for the key."""
    rewrite_jitter: float = 0.1
    """Writers rewrite to changed owners within this many seconds, not all at the same moment."""
    warm_spread: float = 0.1
    """After a change of the ring, keys that nobody asks for are merged over this many seconds."""
    returned_seconds: float = 1.0
    """Seconds for which a key waits for what returned members hold: silent ones stop nobody."""
    mismatch_pause: float = 0.02
    """Seconds until owners that disagreed are asked again, at first (doubling, to the retry's)."""
    keep_former_seconds: float = 600.0
    """How long a former owner keeps what it holds, for new owners that have not asked yet."""
    bucket_registers: int = 48
    """Registers of writers under one bucket of a key above which its owner calls it crowded."""
    max_buckets: int = 1024
    """Buckets over which one key is spread at most."""
    rewrite_rate: float = 200.0
    """Registers that one peer writes again each second, after owners have changed."""
    forget_hidden_after: float = 60.0
    """Seconds after which a closed handle's records are withdrawn: longer than a pull retries."""


@dataclass(frozen=True)
class AbroadConfig(Checked):
    """What is found in other zones, through their gateways."""

    patience: float = 2.0
    """Seconds for which a read waits for other zones, at most; those that don't answer by then
    are left out."""
    retry_interval: float = 0.5
    """Seconds until an unanswered gateway is given up for the next one."""
    revisit_interval: float = 2.0
    """Seconds for which another zone's answer is used again, unless its summary says more."""
    silent_seconds: float = 10.0
    """Seconds for which no read waits for a zone that did not answer."""
    forsaken_after: float = 20.0
    """Seconds without an answer of a zone until its peers' pins hold no version back."""
    write_patience: float = 4.0
    """Seconds that a pin or a mark in another zone may take; then the call is decided anew."""
    withdraw_retry_limit: float = 30.0
    """Longest pause, in seconds, between two tries to take a pin in another zone back
    (doubling up to it)."""
    max_asked: int = 64
    """Keys that a gateway reads for other zones at a time; who asks for more is sent to another."""
    max_answer_bytes: int = 512 << 10
    """Bytes of one answer; what is left out is of the oldest publications."""
    max_keys: int = 256
    """Keys of other zones whose answers are remembered, or waited for, at a time."""
    max_registers: int = 20_000
    """Registers remembered of all other zones; the answers used least lately go first."""
    max_peers: int = 20_000
    """Peers of other zones that are remembered; those met least lately are forgotten."""


@dataclass(frozen=True)
class GroupConfig(Checked):
    """Slots, elections and group calls."""

    retry_interval: float = 0.25
    """Seconds until an unanswered member is asked again."""
    recall_seconds: float = 1.0
    """Seconds for which a call that a death interrupted is looked for among the survivors."""
    ask_retry_limit: float = 2.0
    """Longest pause, in seconds, between two times that a waiting member asks its leader (doubling
    up to it)."""
    look_interval: float = 30.0
    """Longest pause, in seconds, between two looks, of a member that waits in a call or for the
    others to come, at its group's key. It is told of changes: this is for news that is lost."""
    floor_interval: float = 2.0
    """Seconds between two writes of the group's floor."""
    election_backoff: float = 0.5
    """Seconds per shard number that claimants other than the lowest wait before they stand."""
    mark_after: float = 0.05
    """Seconds from a publish until its shards look whether the version is whole, and mark it so:
    whoever waits for it has done that by then."""
    pin_idle_seconds: float = 300.0
    """Seconds without a sign of a decided call, from any member that isn't done with it, after
    which it is void: else a group that never asks again would hold its version back for ever.
    Longer than the calls of one shard lag behind those of another."""


@dataclass(frozen=True)
class RetentionConfig(Checked):
    """Keeping retained versions."""

    promise_patience: float = 0.5
    """Seconds in which a holder answers whether it keeps a version; after that it is a no."""
    max_asked: int = 3
    """Holders that are asked before a version is offloaded."""
    promise_seconds: float = 60.0
    """Seconds for which a promise binds its giver, whatever the retains on record say: longer
    than they need to come from another zone."""
    reserve_patience: float = 1.0
    """Seconds in which a group reserves memory for all its shards."""
    reserve_seconds: float = 30.0
    """Seconds after which a reservation that nobody used or renewed lapses."""
    look_interval: float = 2.0
    """Shortest time, in seconds, between two looks whether an offload is still needed; and between
    two looks whether what is served was retracted."""
    rare_look_interval: float = 30.0
    """Mean seconds until it is looked whether an offload is still needed though nothing told of a
    change (jittered)."""
    notice_interval: float = 2.0
    """Seconds between two looks of a gateway at what its zone retains."""
    max_kept: int = 64
    """Offloads of one peer."""


@dataclass(frozen=True)
class PullConfig(Checked):
    """Reading and serving chunks."""

    lease_seconds: float = 2.0
    """A read lease lapses after this long without progress."""
    update_interval: float = 0.02
    """Seconds over which news of chunks is collected before it is sent."""
    upload_slots: int = 16
    """Pullers that one shard serves at a time; fewer while other models are pulled there, too."""
    reader_threads: int = 2
    """Threads that read and verify in one pull; a source beyond these has one of its own."""
    chunks_in_flight: int = 8
    """Chunks that one pull has asked for and not received, stalled ones and its share of a source
    that others read too aside; twice `reader_threads` if that is more."""
    run_ahead: float = 30.0
    """Seconds' worth of chunks that the only source of a pull is asked for ahead of time, so that
    it goes on sending while its Python is held up."""
    source_timeout: float = 2.0
    """Seconds after which a source that delivers nothing loses its chunks in flight."""
    slowest_rate: float = 256 * 1024
    """Bytes a second below which a source counts as delivering nothing."""
    late_after: float = 0.25
    """Seconds after which it is judged whether other pullers bring what is left to them; or else
    it is fetched from the source that all share, too. Also the shortest time until a chunk is
    taken back from a slow source at the end."""
    unavailable_after: float = 5.0
    """Seconds for which no reachable holder has some chunk until the pull gives up."""
    unsealed_after: float = 0.5
    """Seconds until it gives up on chunks that nobody can have any more: their publisher is dead,
    and all other holders have said since that they lack them, and their digests."""
    retry_interval: float = 0.25
    """Seconds until an unanswered request, or a full source, is asked again (doubling, to 8x)."""
    max_sources: int = 16
    """Sources that one pull holds leases at, or asks, at a time."""
    max_candidates: int = 256
    """Holders that one pull remembers; farther ones beyond it are ignored."""
    max_waiting: int = 256
    """Pullers that one shard remembers while its upload slots are full; later ones ask again."""
    news_interval: float = 0.01
    """Seconds over which chunks or digests that come fast are collected on their way to others."""
    failure_memory: float = 60.0
    """Seconds for which a transport that failed on a link is not tried there again, while
    another one works."""
    holders_interval: float = 1.0
    """Seconds after which a pull looks anew who holds its shard, whether it was told or not."""
    carriers: int = 4
    """Pullers of a zone that fetch one shard of one publication from other zones."""
    carrier_timeout: float = 2.0
    """Seconds without a sign of progress after which such a one loses its chunks to the next."""
    announce_patience: float = 0.5
    """Seconds that a pull waits, at most, until the zone knows of it, before it fetches anything
    from another one."""
    prefetch_limit: int | None = field(default=None, metadata={"minimum": 0})
    """Bytes of host memory for what one peer prefetches, over all its handles; None: a quarter of
    what the process may use. 0: nothing is prefetched."""


@dataclass(frozen=True)
class MemoryConfig(Checked):
    """Registered memory."""

    huge_pages: bool = True
    """Ask for huge pages behind large tensors, in the background, when they are registered."""
    huge_page_load: float = field(default=0.5, metadata={"maximum": 1})
    """Part of one core, up to 1, that asking for them may take."""


@dataclass(frozen=True)
class TcpConfig(Checked):
    """The data port."""

    max_connections: int = 256
    """Streams served at a time; more are closed at once."""
    handshake_timeout: float = 5.0
    """Seconds until a new connection must have made its first request, or be reached."""
    idle_timeout: float = 300.0
    """Seconds after which a connection without a request is closed."""
    stall_timeout: float = 10.0
    """Seconds after which a puller that takes no bytes is broken off."""
    max_streams: int = 8
    """Streams that a pull may have to one holder, if so many make it faster."""
    stream_period: float = 0.25
    """Seconds of moving over which the rate of a number of streams is measured."""
    stream_again_after: float = 60.0
    """Seconds of moving after which another number of streams is tried again."""


@dataclass(frozen=True)
class LinkRule:
    """Which transports the links to some peers use, in which order.

    A rule matches by all that is given: `locality` ("host", "rack", "zone" or "far", the peer's
    distance from here), and shell patterns (`*`, `?`, `[…]`) for the peer's `peer` name, its
    `zone`, and its `host` label. The first rule that matches counts; without one the
    peer's own `transports` do.
    """

    transports: tuple[str, ...]
    """Tried in this order; each must be one of the peer's own `transports`."""
    locality: str = ""
    peer: str = ""
    zone: str = ""
    host: str = ""

    def __post_init__(self) -> None:
        given: object = self.transports
        if isinstance(given, str) or not given:
            raise ConfigError(f"LinkRule.transports = {self.transports!r}: give a tuple of names")
        object.__setattr__(self, "transports", tuple(self.transports))
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown or len(set(self.transports)) < len(self.transports):
            raise ConfigError(
                f"LinkRule.transports = {list(self.transports)}: choose from "
                f"{', '.join(TRANSPORTS)}, each once"
            )
        if self.locality not in ("", "host", "rack", "zone", "far"):
            raise ConfigError(
                f"LinkRule.locality = {self.locality!r}: choose from host, rack, zone, far"
            )
        if not (self.locality or self.peer or self.zone or self.host):
            raise ConfigError(
                "LinkRule matches every link: give a locality, peer, zone or host, or order "
                "the peer's own transports"
            )


@dataclass(frozen=True)
class NixlConfig(Checked):
    """One-sided reads."""

    idle_agents: int = 4
    """Agents for reading that are kept between pulls, with what they have registered."""
    idle_pause: float = 0.005
    """Seconds between two looks whether somebody connects."""
    busy_pause: float = 0.0002
    """The same, right after a look that had something to do."""


@dataclass(frozen=True)
class UcxConfig(Checked):
    """Messages through UCX."""

    max_readers: int = 64
    """Streams that are served at a time; more are refused."""
    max_waiting: int = 64
    """Requests that are taken in at a time; further ones wait inside UCX."""
    stall_timeout: float = 10.0
    """Seconds after which a puller that takes no bytes is given up."""


@dataclass(frozen=True)
class WireConfig(Checked):
    """ZeroMQ and the control thread."""

    max_connections: int = 256
    """Outgoing control connections kept open; the least recently used is closed beyond it."""
    send_queue: int = 1000
    """Messages queued for one connection; more are dropped (and counted)."""
    handshake_timeout: float = 5.0
    """Seconds a connection may take for its handshake."""
    heartbeat_interval: float = 2.0
    """Seconds between ZMTP heartbeats on connections that carry messages."""
    heartbeat_timeout: float = 8.0
    """Seconds without a heartbeat's answer until such a connection counts as lost."""
    watch_interval: float = 0.25
    """Seconds between ZMTP heartbeats on watch connections."""
    watch_timeout: float = 1.0
    """Seconds without a heartbeat's answer until a watch counts as lost."""
    watch_connect_timeout: float = 2.0
    """Seconds without an answer until a watch that is renewed counts as unreachable."""
    watch_retry_limit: float = 4.0
    """Longest pause, in seconds, between two tries to renew a watch (doubling up to it)."""
    look_timeout: float = 0.4
    """Seconds for a look at a silent peer's sockets; less than a probe has left when it goes
    indirect."""
    unheard_log_interval: float = 60.0
    """Seconds until it is logged again that what this peer sends seems to get lost."""
    listen_backlog: int = 1024
    """Connections that the kernel accepts for a process that stands still."""
    resolve_retry: float = 0.5
    """Seconds until a name that could not be resolved is looked up again."""
    connect_timeout: float = 3.0
    """Seconds a TCP connect may take; then the destination's next address is tried."""
    redial_interval: float = 0.2
    """Seconds a link that failed rests; what is sent to it meanwhile is dropped (and counted)."""
    max_addresses: int = 50_000
    """Peers whose addresses are remembered; the least recently used is forgotten beyond it."""
    receive_batch: int = 256
    """Messages taken in before due timers and the outbox have their turn."""
    call_queue: int = 10_000
    """Calls waiting for the control thread; beyond it their callers wait for room."""
    close_linger: float = 0.5
    """Seconds that closing may take to get the last messages out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.watch_interval >= self.watch_timeout:
            raise ConfigError(
                f"WireConfig.watch_timeout = {self.watch_timeout}: must be above "
                f"watch_interval = {self.watch_interval}"
            )


@dataclass(frozen=True)
class Config:
    """All of it. Pass as `Peer(config=...)`."""

    swim: SwimConfig = field(default_factory=SwimConfig)
    wan: SwimConfig = WIDE_AREA
    zones: ZonesConfig = field(default_factory=ZonesConfig)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    abroad: AbroadConfig = field(default_factory=AbroadConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    pull: PullConfig = field(default_factory=PullConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    tcp: TcpConfig = field(default_factory=TcpConfig)
    nixl: NixlConfig = field(default_factory=NixlConfig)
    ucx: UcxConfig = field(default_factory=UcxConfig)
    links: tuple[LinkRule, ...] = ()
    """Rules for single links; the first that matches counts."""
    wire: WireConfig = field(default_factory=WireConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", tuple(self.links))
        for rule in self.links:
            if not isinstance(rule, LinkRule):
                raise ConfigError(f"Config.links: {rule!r} is no LinkRule")
