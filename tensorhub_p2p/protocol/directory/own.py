"""What one peer wrote to the directory, remembered to write it again where it is missing.

Rules of this file. `OwnRegisters` are the registers of one writer, by key and name, and the
marks that it wrote. It sends nothing: when something is written again is the directory's business.

Theory of operation. The writer is the only one who knows what it means to say, so it compares:
the fingerprint of its registers of a key with what an owner holds of it. Where they differ the
owner lists what it holds; `missing` says what has to be written again, which includes a
withdrawal of what the writer knows nothing of (any more).

A register that nobody needs any more is withdrawn a while later (`let_go`), unless it was
written again by then. A withdrawn one is remembered for a while, as owners may still lack that.

What bounds it: names in use; `MAX_MARKS` marks; withdrawn registers by `MAX_WITHDRAWN` and by
the time for which they are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from tensorhub_p2p.protocol.directory.registers import Mark, of_mark, print_of
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Buckets, Key, Register, Retraction, Value

MAX_MARKS = 64
MAX_WITHDRAWN = 1024

Place = tuple[Key, str]
"""Where an own register lives: key and name."""
Standing = tuple[str, int, int]
"""Name, generation and sequence of a register that an owner holds."""


class OwnRegisters:
    """The registers of the peer `me`."""

    def __init__(self, me: PeerId, keep_withdrawn: float) -> None:
        self.me = me
        self._keep_withdrawn = keep_withdrawn
        self._last_sequence = 0
        self._mine: dict[Key, dict[str, Register]] = {}
        self._prints: dict[Key, int] = {}
        self._marks: dict[Place, Register] = {}
        self._withdrawn: dict[Place, float] = {}
        """Since when, the longest withdrawn first."""
        self._let_go: dict[Place, tuple[float, Register]] = {}
        """When to withdraw what, the first one first."""

    def __len__(self) -> int:
        return sum(map(len, self._mine.values()))

    @property
    def keys(self) -> Collection[Key]:
        """Keys with own registers (marks don't count)."""
        return self._mine.keys()

    def is_over(self, key: Key) -> bool:
        """All that was written there is withdrawn, or will be: nobody needs it."""
        return all(
            register.value is None or (key, name) in self._let_go
            for name, register in self._mine.get(key, {}).items()
        )

    def get(self, place: Place) -> Register | None:
        """What is written there: a register, or a mark."""
        key, name = place
        return self._mine.get(key, {}).get(name) or self._marks.get(place)

    def marks(self) -> Iterator[Place]:
        """That still matter: all but those of publications that no own register names."""
        for (key, name), register in self._marks.items():
            if isinstance(register.value, (Retraction, Buckets)) or any(
                getattr(own.value, "publication", None) == getattr(register.value, "publication", 0)
                for own in self._mine.get(key, {}).values()
            ):
                yield key, name

    def fingerprint(self, key: Key) -> int:
        """Of what an owner of the key should hold by this writer."""
        return self._prints.get(key, 0)

    # -- writing --

    def put(self, now: float, place: Place, generation: int, value: Value | None) -> Register:
        """A new register for this place, above the one before."""
        self._last_sequence += 1
        key, name = place
        register = Register(self.me, name, generation, self._last_sequence, value)
        self._drop(place)
        self._mine.setdefault(key, {})[name] = register
        self._prints[key] = self._prints.get(key, 0) ^ print_of(register)
        if value is None:
            self._withdrawn[place] = now
            self.prune(now)
        return register

    def put_mark(self, key: Key, mark: Mark) -> Register:
        register = of_mark(mark)
        self._marks[(key, register.name)] = register
        if len(self._marks) > MAX_MARKS:
            del self._marks[next(iter(self._marks))]
        return register

    def drop_mark(self, place: Place) -> None:
        """The owners refused it."""
        self._marks.pop(place, None)

    def _drop(self, place: Place) -> None:
        key, name = place
        self._withdrawn.pop(place, None)
        self._let_go.pop(place, None)
        registers = self._mine.get(key, {})
        register = registers.pop(name, None)
        if register is not None:
            self._prints[key] ^= print_of(register)
        if key in self._mine and not registers:
            del self._mine[key], self._prints[key]

    def prune(self, now: float) -> None:
        """Forget what was withdrawn long ago, or too much of it."""
        while self._withdrawn:
            place, since = next(iter(self._withdrawn.items()))
            if len(self._withdrawn) <= MAX_WITHDRAWN and since > now - self._keep_withdrawn:
                return
            self._drop(place)

    # -- what nobody needs any more --

    def let_go(self, place: Place, when: float) -> None:
        """`due` names it at that time, never before an earlier one, unless it is written again."""
        key, name = place
        register = self._mine.get(key, {}).get(name)
        if register is not None and register.value is not None:
            self._let_go.pop(place, None)
            self._let_go[place] = (when, register)

    def due(self, now: float) -> list[tuple[Place, Register]]:
        """What is to be withdrawn now."""
        due: list[tuple[Place, Register]] = []
        while self._let_go:
            place, (when, register) = next(iter(self._let_go.items()))
            if when > now:
                break
            del self._let_go[place]
            due.append((place, register))
        return due

    def next_due(self) -> float | None:
        return next((when for when, _ in self._let_go.values()), None)

    # -- comparing --

    def missing(self, now: float, key: Key, held: Iterable[Standing]) -> list[Register]:
        """What an owner that holds just these of this writer has to be told."""
        standing = {name: (generation, sequence) for name, generation, sequence in held}
        for name, (generation, _) in standing.items():
            if name not in self._mine.get(key, {}):
                self.put(now, (key, name), generation, None)
        wanted = [
            register
            for register in self._mine.get(key, {}).values()
            if standing.get(register.name, (-1, -1)) < register.order
            and (register.value is not None or register.name in standing)
        ]
        return wanted + [mark for (at, _), mark in self._marks.items() if at == key]
