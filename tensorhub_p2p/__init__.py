"""Weights for LLM reinforcement learning, moved between workers with no server."""

from __future__ import annotations

from tensorhub_p2p.config import (
    AbroadConfig,
    Config,
    ConfigError,
    DirectoryConfig,
    GroupConfig,
    LinkRule,
    MemoryConfig,
    NixlConfig,
    PullConfig,
    RetentionConfig,
    SwimConfig,
    TcpConfig,
    UcxConfig,
    WireConfig,
    ZonesConfig,
)
from tensorhub_p2p.errors import (
    AuthenticationError,
    GroupBroken,
    GroupDivergence,
    IntegrityError,
    JoinError,
    LayoutMismatch,
    NotEnoughMemory,
    PeerClosed,
    RetentionLost,
    SlotTaken,
    StateError,
    TensorHubError,
    Timeout,
    TransferError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub_p2p.handle import ShardHandle
from tensorhub_p2p.peer import Peer, close_on_sigterm
from tensorhub_p2p.protocol.messages import Retain
from tensorhub_p2p.results import (
    Fallback,
    HandleState,
    Member,
    Pull,
    SourceReport,
    TransportReport,
    VersionInfo,
    ZoneInfo,
)
from tensorhub_p2p.retains import newest, versions
from tensorhub_p2p.runtime.prefetching import Prefetch
from tensorhub_p2p.runtime.security import keygen

__version__ = "0.1.0"

__all__ = [
    "AbroadConfig",
    "AuthenticationError",
    "Config",
    "ConfigError",
    "DirectoryConfig",
    "Fallback",
    "GroupBroken",
    "GroupConfig",
    "GroupDivergence",
    "HandleState",
    "IntegrityError",
    "JoinError",
    "LayoutMismatch",
    "LinkRule",
    "Member",
    "MemoryConfig",
    "NixlConfig",
    "NotEnoughMemory",
    "Peer",
    "PeerClosed",
    "Prefetch",
    "Pull",
    "PullConfig",
    "Retain",
    "RetentionConfig",
    "RetentionLost",
    "ShardHandle",
    "SlotTaken",
    "SourceReport",
    "StateError",
    "SwimConfig",
    "TcpConfig",
    "TensorHubError",
    "Timeout",
    "TransferError",
    "TransportReport",
    "UcxConfig",
    "VersionConflict",
    "VersionInfo",
    "VersionUnavailable",
    "WireConfig",
    "ZoneInfo",
    "ZonesConfig",
    "__version__",
    "close_on_sigterm",
    "keygen",
    "newest",
    "versions",
]
