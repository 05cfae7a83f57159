"""Three zones of processes on one machine: each chunk crosses once into each of them.

What crosses is counted in the pulls' own reports, by sources of another zone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import steps
from workers import Worker

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.layout import chunk_bytes_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]
TENSORS = 8
CHUNKS = TENSORS * steps.MIB // chunk_bytes_for(TENSORS * steps.MIB)
IN_FLIGHT = PullConfig().chunks_in_flight
"""Chunks that one puller asks another zone for at a time."""
SLOW = 0.1
"""Seconds that each chunk of another zone takes longer."""
Take = Callable[[int], list[Worker]]


@pytest.fixture
def zones(take: Take, cluster: str) -> Callable[..., list[list[Worker]]]:
    """Zones of so many pullers each; a trainer at home has published what they want."""

    def start(*sizes: int) -> list[list[Worker]]:
        (trainer, *pullers) = take(1 + sum(sizes))
        seeds = [trainer.do(steps.start, cluster, zone="home", transports=["tcp"], name="home")]
        trainer.do(steps.open_shard, "trainer", count=TENSORS)
        zones = []
        for zone, size in enumerate(sizes):
            zones.append(pullers[:size])
            pullers = pullers[size:]
            for number, worker in enumerate(zones[-1]):
                options: dict[str, Any] = {"zone": f"zone-{zone}", "transports": ["tcp"]}
                worker.do(steps.start, cluster, seeds, name=f"{zone}-{number}", **options)
                worker.do(steps.open_shard, f"{zone}-{number}", count=TENSORS)
        trainer.do(steps.publish, 1)
        return zones

    return start


def crossed(pulls: list[Any]) -> int:
    """Chunks that came from other zones."""
    return sum(s.chunks for pull in pulls for s in pull.sources if s.locality == "far")


def test_each_chunk_crosses_once_into_each_zone(zones: Callable[..., list[list[Worker]]]) -> None:
    both = zones(2, 2)
    for zone in both:
        for worker in zone:
            worker.begin(steps.replicate_across, SLOW)
    for zone in both:
        pulls = [worker.finish() for worker in zone]
        assert CHUNKS <= crossed(pulls) <= CHUNKS + IN_FLIGHT
        assert all(worker.do(steps.faults) == [] for worker in zone)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_carrier_that_fails_costs_what_it_had_in_flight(
    zones: Callable[..., list[list[Worker]]], fault: signal.Signals
) -> None:
    ((victim, *rest),) = zones(3)
    victim.begin(steps.replicate_across, SLOW, say_at=4)
    for worker in rest:
        worker.begin(steps.replicate_across, SLOW)
    victim.wait_said("in the middle")
    victim.signal(fault)
    pulls = [worker.finish() for worker in rest]
    if fault is signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        pulls.append(victim.finish())
        assert crossed(pulls) >= CHUNKS
    # What the victim had in place, and nobody else yet, is lost like what it had in flight.
    assert crossed(pulls) <= CHUNKS + 2 * IN_FLIGHT
    assert all(worker.do(steps.faults) == [] for worker in rest)
