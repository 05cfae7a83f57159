"""Named runs: what once broke something, and what shows a deliberate bug.

Each is small, quick and the same each time, as far as processes can be. `python -m chaos
scenario NAME` plays one; the tests see that all have what they need.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaos.arena import Role
from chaos.casting import SOON, Shape
from chaos.faults import FAULTS
from chaos.schedule import Planned

MIB = 1 << 20
SPARE_SHAPE = Shape(period=2.0, tensors=2, size=4 * MIB, mbit=250.0)
CALM_SHAPE = Shape(period=2.0)
USURPED_SHAPE = Shape(period=2.0, unresponsive=SOON)


@dataclass(frozen=True)
class Scenario:
    """`finds`: the check that must find something, as a bug is planted; "" if none may. `apart`:
    one fault at a time, each over, and what it broke whole again, before the next."""

    about: str
    cast: tuple[Role, ...]
    shape: Shape = CALM_SHAPE
    faults: tuple[Planned, ...] = ()
    seconds: float = 20.0
    calm: float = 6.0
    bug: str = ""
    finds: str = ""
    apart: bool = False


def trainer(number: int) -> Role:
    name = f"trainer-{number}"
    return Role(name, "trainer", name, host=number, seed=True)


def rollout(number: int, *, seed: bool = False) -> Role:
    name = f"rollout-{number}"
    return Role(name, "rollout", name, host=2 + number, seed=seed)


KEEPER = Role("keeper-0", "keeper", "keeper-0", host=2, newest=4, seed=True)
SMALL = (trainer(0), rollout(0, seed=True), rollout(1, seed=True), rollout(2))
KEPT = (trainer(0), trainer(1), KEEPER)
SPARE = (trainer(0), trainer(1), rollout(0, seed=True), *(rollout(n) for n in range(1, 5)))
"""Whichever source dies, there is another one. By TCP only, as each has a host of its own."""

REPLACEABLE = (
    Role("trainer-0", "trainer", "trainer-0", host=0),
    Role("trainer-1", "trainer", "trainer-1", host=1),
    *(rollout(n, seed=True) for n in range(3)),
    rollout(3),
)
"""Trainers whose slots can be taken, as they are no seeds."""


def every(seconds: float, kind: str, until: float) -> tuple[Planned, ...]:
    count = int(until / seconds)
    return tuple(Planned(seconds * (number + 1), kind) for number in range(count))


def alone(kind: str, count: int, about: str = "") -> Scenario:
    """This fault, so often, where whoever is hurt isn't the only one to have or do something."""
    return Scenario(about or kind, SPARE, SPARE_SHAPE, (Planned(0.0, kind),) * count, apart=True)


SCENARIOS: dict[str, Scenario] = {
    "calm": Scenario("nothing is done to anybody", SMALL, seconds=10.0),
    "sources-die": alone(
        "kill a source", 8, "sources are killed one after the other, and others are there"
    ),
    "sources-stop": alone(
        "stop a source", 6, "sources are stopped one after the other, and others are there"
    ),
    "each-kind": Scenario(
        "every kind of fault, one at a time, with nothing else going on",
        SPARE,
        SPARE_SHAPE,
        faults=tuple(Planned(0.0, kind) for kind in FAULTS),
        apart=True,
    ),
    "usurped": Scenario(
        "new processes take over the slots of stopped ones, which go on later",
        REPLACEABLE,
        USURPED_SHAPE,
        faults=every(4.0, "usurp a slot", 30.0),
        seconds=34.0,
        calm=16.0,
    ),
    "bug-fence": Scenario(
        "who was replaced goes on",
        REPLACEABLE,
        USURPED_SHAPE,
        faults=every(4.0, "usurp a slot", 30.0),
        seconds=34.0,
        bug="who_was_replaced_goes_on",
        finds="who_was_replaced_changes_nothing",
    ),
    "no-descriptors": Scenario(
        "descriptors run out, and are there again: then everything works, copies too",
        (*KEPT, rollout(1), rollout(2)),
        faults=every(5.0, "descriptors used up", 30.0),
        seconds=34.0,
        calm=16.0,
    ),
    "strangers": Scenario(
        "something else answers where seeds were, and is hung up on",
        SPARE,
        faults=every(4.0, "a stranger on a seed's port", 30.0),
        seconds=34.0,
        calm=16.0,
    ),
    "told-to-end": Scenario(
        "SIGTERM in the middle of each verb",
        REPLACEABLE,
        faults=every(3.0, "SIGTERM in a verb", 30.0),
        seconds=34.0,
        calm=16.0,
    ),
    "retained": Scenario("old versions are asked for", KEPT, seconds=16.0),
    "bug-digest": Scenario(
        "bits flip in sources, and nobody compares digests",
        SMALL,
        faults=every(1.0, "flipped bits", 18.0),
        bug="no_digest_is_compared",
        finds="right_bytes",
    ),
    "bug-stale": Scenario(
        "a leader answers from what it read before",
        SMALL,
        bug="a_leader_answers_from_what_it_read_before",
        finds="fresh",
    ),
    "bug-offload": Scenario(
        "copies for retainers are dropped",
        KEPT,
        bug="a_copy_for_retainers_is_dropped",
        finds="retained_versions_stay",
    ),
    "bug-promise": Scenario(
        "two that withdraw at once promise each other to keep it",
        (trainer(0), KEEPER, rollout(1), rollout(2)),
        bug="who_withdraws_promises_to_keep",
        finds="retained_versions_stay",
    ),
    "bug-drain": Scenario(
        "a withdrawal waits for no reader",
        SMALL,
        Shape(period=1.0, tensors=2, size=16 * MIB, mbit=250.0),
        bug="a_drain_is_forgotten",
        finds="nobody_reads_what_was_taken_back",
    ),
    "bug-digest-late": Scenario(
        "digests are taken of tensors that were taken back",
        SMALL,
        Shape(period=4.0, step=3.2, tensors=2, size=MIB),
        bug="digests_go_on_after_the_withdrawal",
        finds="right_bytes",
    ),
}


MEASURED = ("each-kind", "sources-die", "sources-stop")
"""What `make chaos` plays at its end, for the stalls of one fault at a time."""
