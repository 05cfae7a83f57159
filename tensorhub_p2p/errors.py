"""The typed errors of the library.

Every message says what happened, to which peer, and what to do about it. An
error that a user can meet has a class here, and nothing else is raised on purpose, but for
arguments that can't be meant: those are ValueErrors (`ConfigError` is one).
"""

from __future__ import annotations


class TensorHubError(Exception):
    """Base class of every error that this library raises on purpose."""


class JoinError(TensorHubError):
    """No seed could be joined: unreachable, of another cluster, or the own port is in use."""


class AuthenticationError(JoinError):
    """A seed was reached but refused the handshake: the secrets differ."""


class StateError(TensorHubError):
    """The call doesn't fit the handle's state, or one handle was used by two threads at once."""


class PeerClosed(StateError):
    """The peer was closed, or belongs to another process (a fork)."""


class Timeout(TensorHubError, TimeoutError):
    """The deadline passed. The message names what was waited for, and from whom."""


class VersionConflict(TensorHubError):
    """The version is not above what exists, or another publisher's content differs."""


class VersionUnavailable(TensorHubError):
    """The version can't be had: its origin died unsealed, or no reachable holder has a chunk."""


class LayoutMismatch(TensorHubError):
    """Names, shapes, dtypes or counts differ; lists the differences. No byte was written."""


class IntegrityError(TensorHubError):
    """Bytes didn't match the origin's digests, and no other source had the right ones."""


class RetentionLost(TensorHubError):
    """A retained version could not be kept."""


class GroupBroken(TensorHubError):
    """The group's generation ended (a member died, or a call was voided).

    Raised once for every member of the generation that ended; the next call
    belongs to the next generation, whose call numbers start at 1.
    """


class GroupDivergence(TensorHubError):
    """Members of one group asked different questions in the same call."""


class SlotTaken(TensorHubError):
    """Another live peer holds this shard of this replica."""


class TransferError(TensorHubError):
    """No transport could move the bytes, or each read failed; the message says why, for each."""


class NotEnoughMemory(TensorHubError, MemoryError):
    """A prefetch would take more host memory than its limit allows, or than there is."""
