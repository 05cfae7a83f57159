"""Digests: what they are of, in which order they are taken, and when no more are."""

from __future__ import annotations

import errno
import os
import threading
import time
from itertools import pairwise

import pytest
import torch
import xxhash

from tensorhub_p2p.errors import StateError
from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES
from tensorhub_p2p.transfer import digest as digest_module
from tensorhub_p2p.transfer.digest import Digester, digest
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch

CHUNK = MIN_CHUNK_BYTES
WAIT = 10.0


def flat(chunks: int) -> Region:
    return Region.of({"x": torch.randint(0, 255, (chunks * CHUNK,), dtype=torch.uint8)})


class Collected:
    """What a job reported, and a way to wait for more of it."""

    def __init__(self) -> None:
        self.digests: dict[int, bytes] = {}
        self.order: list[int] = []
        self._changed = threading.Condition()

    def __call__(self, chunk: int, value: bytes) -> None:
        with self._changed:
            self.digests[chunk] = value
            self.order.append(chunk)
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.order) >= count, WAIT)


class Gate(Collected):
    """Holds the digest thread in its first call until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, chunk: int, value: bytes) -> None:
        self.entered.set()
        assert self.open.wait(WAIT)
        super().__call__(chunk, value)


@pytest.mark.parametrize("piece", [3, 4096, 70_000, 3 * CHUNK])
def test_a_digest_is_xxh3_of_the_chunks_bytes_however_they_are_scattered(piece: int) -> None:
    total = 3 * CHUNK + 17
    content = torch.randint(0, 255, (total,), dtype=torch.uint8)
    count = min(total // piece + 1, 2000)
    cuts = [i * piece for i in range(count)] + [total]
    tensors = {f"t{i}": content[a:b].clone() for i, (a, b) in enumerate(pairwise(cuts))}
    region = Region.of(tensors)
    data = content.numpy().tobytes()
    scratch = Scratch()
    for chunk in range(region.layout.num_chunks):
        start, length = region.layout.chunk_range(chunk)
        expected = xxhash.xxh3_128(data[start : start + length]).digest()
        assert digest(region, chunk, scratch) == expected
    assert len(expected) == digest_module.DIGEST_BYTES


def test_the_digester_takes_each_chunk_once() -> None:
    digester, region, done = Digester(), flat(5), Collected()
    digester.submit(region, range(5), done)
    done.wait(5)
    digester.close()
    scratch = Scratch()
    assert done.digests == {c: digest(region, c, scratch) for c in range(5)}
    assert sorted(done.order) == list(range(5))


def test_digests_are_taken_where_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is out of them for a while is not without digests for ever."""

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    digester, done = Digester(), Collected()
    monkeypatch.setattr(os, "memfd_create", none_left)
    digester.submit(flat(5), range(5), done)
    done.wait(5)
    digester.close()


def test_chunks_that_somebody_asked_for_come_first_across_jobs() -> None:
    digester, gate, first, second = Digester(0.0), Gate(), Collected(), Collected()
    digester.submit(flat(1), [0], gate)
    assert gate.entered.wait(WAIT)
    together: list[tuple[str, int]] = []
    digester.submit(flat(4), range(4), lambda c, d: (together.append(("a", c)), first(c, d))[0])
    wanted = digester.submit(
        flat(4), range(4), lambda c, d: (together.append(("b", c)), second(c, d))[0]
    )
    wanted.prefer([3, 2, 3])
    gate.open.set()
    first.wait(4)
    second.wait(4)
    digester.close()
    assert together[:2] == [("b", 3), ("b", 2)]
    assert sorted(together) == [(job, c) for job in "ab" for c in range(4)]


def test_jobs_take_turns() -> None:
    digester, gate, done = Digester(0.0), Gate(), Collected()
    digester.submit(flat(1), [0], gate)
    assert gate.entered.wait(WAIT)
    turns: list[str] = []
    for job in "ab":
        digester.submit(flat(3), range(3), lambda c, d, j=job: (turns.append(j), done(c, d))[0])
    gate.open.set()
    done.wait(6)
    digester.close()
    assert "".join(turns) == "ababab"


def test_digests_are_told_together_but_the_first_that_was_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    real = digest_module.digest

    def noted(region: Region, chunk: int, scratch: Scratch) -> bytes:
        events.append(f"take {chunk}")
        return real(region, chunk, scratch)

    monkeypatch.setattr(digest_module, "digest", noted)
    digester, gate, done = Digester(news_interval=WAIT), Gate(), Collected()
    digester.submit(flat(1), [0], gate)
    assert gate.entered.wait(WAIT)
    events.clear()
    job = digester.submit(
        flat(5), range(5), lambda c, d: (events.append(f"tell {c}"), done(c, d))[0]
    )
    job.prefer([3])
    gate.open.set()
    done.wait(5)
    digester.close()
    assert " ".join(events) == (
        "take 3 tell 3 take 0 take 1 take 2 take 4 tell 0 tell 1 tell 2 tell 4"
    )


def test_after_cancel_returns_nothing_of_the_job_runs_or_will_run() -> None:
    digester, gate = Digester(), Gate()
    job = digester.submit(flat(3), range(3), gate)
    assert gate.entered.wait(WAIT)
    cancelled = threading.Event()
    canceller = threading.Thread(target=lambda: (job.cancel(), cancelled.set()))
    canceller.start()
    assert not cancelled.wait(0.05), "cancel returned while a digest was under way"
    gate.open.set()
    assert cancelled.wait(WAIT)
    canceller.join()
    assert gate.order == [0]
    after = Collected()
    digester.submit(flat(2), range(2), after)
    after.wait(2)
    assert gate.order == [0]
    digester.close()


def test_cancel_from_the_callback_does_not_wait_for_itself() -> None:
    digester, done = Digester(), Collected()
    jobs = []
    ready = threading.Event()

    def once(chunk: int, value: bytes) -> None:
        assert ready.wait(WAIT)
        jobs[0].cancel()
        done(chunk, value)

    jobs.append(digester.submit(flat(3), range(3), once))
    ready.set()
    done.wait(1)
    other = Collected()
    digester.submit(flat(1), [0], other)
    other.wait(1)
    digester.close()
    assert done.order == [0]


def test_a_job_that_fails_says_why_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    digester, done = Digester(), Collected()

    def fail(chunk: int, value: bytes) -> None:
        raise RuntimeError("broken")

    job = digester.submit(flat(2), range(2), fail)
    digester.submit(flat(2), range(2), done)
    done.wait(2)
    digester.close()
    assert str(job.failure) == "broken"
    assert "ended early" in caplog.text


def test_submit_returns_without_reading_the_memory() -> None:
    digester, gate = Digester(), Gate()
    digester.submit(flat(1), [0], gate)
    assert gate.entered.wait(WAIT)
    region, done = flat(8), Collected()
    before = time.monotonic()
    digester.submit(region, range(8), done)
    assert time.monotonic() - before < 1.0
    assert not done.order
    gate.open.set()
    done.wait(8)
    digester.close()


def test_a_closed_digester_takes_no_job_and_has_no_thread() -> None:
    digester = Digester()
    done = Collected()
    digester.submit(flat(1), [0], done)
    done.wait(1)
    digester.close()
    digester.close()
    assert not [t for t in threading.enumerate() if t.name == "tensorhub_p2p-digest"]
    with pytest.raises(StateError, match="closed"):
        digester.submit(flat(1), [0], done)
