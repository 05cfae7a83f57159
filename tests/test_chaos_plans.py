"""What the chaos suite plans: schedules, casts, scenarios, deliberate bugs, and their docs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chaos import schedule
from chaos.bugs import BUGS
from chaos.casting import PER_HOST, SEEDS, Shape, cast
from chaos.checks import CHECKS
from chaos.faults import FAULTS
from chaos.history import CUTS, DEADLY, INTERRUPTED, SILENCES, STRANGERS, TERMINATED, USURPED
from chaos.programs import PROGRAMS
from chaos.scenarios import SCENARIOS, alone

ROOT = Path(__file__).resolve().parent.parent
DOCS = (ROOT / "docs" / "chaos.md").read_text(encoding="utf-8")


def test_a_schedule_follows_from_its_seed() -> None:
    kinds = sorted(FAULTS)
    assert schedule.draw(7, 60.0, 2.0, kinds) == schedule.draw(7, 60.0, 2.0, kinds)
    assert schedule.draw(7, 60.0, 2.0, kinds) != schedule.draw(8, 60.0, 2.0, kinds)


def test_faults_come_as_often_as_they_are_wanted_and_none_after_the_end() -> None:
    planned = schedule.draw(7, 600.0, 2.0, sorted(FAULTS))
    assert 270 < len(planned) < 330
    assert max(fault.at for fault in planned) < 600.0


def test_what_is_wanted_first_comes_first() -> None:
    planned = schedule.draw(7, 60.0, 2.0, ["stop"], first=["loss", "flipped bits"])
    assert {fault.kind for fault in planned[:2]} == {"loss", "flipped bits"}
    assert {fault.kind for fault in planned[2:]} == {"stop"}


@pytest.mark.parametrize("seed", range(40))
def test_a_cast_is_complete(seed: int) -> None:
    shape = Shape.drawn(seed, workers=20)
    roles = cast(shape)
    assert len(roles) <= 20
    assert len({role.name for role in roles}) == len(roles)
    assert len({role.role for role in roles if role.num_shards == 1}) in {0, 4}
    assert sum(role.seed for role in roles) == SEEDS
    assert len({role.zone for role in roles}) == shape.zones
    by_host = {host: [r for r in roles if r.host == host] for host in range(shape.hosts)}
    assert all(len(there) <= PER_HOST for there in by_host.values())
    for replica in {role.replica for role in roles if role.replica}:
        shards = [role for role in roles if role.replica == replica]
        assert sorted(role.shard for role in shards) == list(range(shape.shards))
        assert len({role.zone for role in shards}) == 1, "a replica lives in one zone"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_can_be_played(name: str) -> None:
    one = SCENARIOS[name]
    assert {fault.kind for fault in one.faults} <= set(FAULTS)
    assert {role.role for role in one.cast} <= set(PROGRAMS)
    assert any(role.seed for role in one.cast)
    assert not one.bug or one.bug in BUGS
    assert not one.finds or one.finds in CHECKS
    assert bool(one.bug) == bool(one.finds)


def test_each_deliberate_bug_has_a_run_that_must_find_it() -> None:
    assert sorted(one.bug for one in SCENARIOS.values() if one.bug) == sorted(BUGS)


def test_bugs_can_be_planted_in_the_library_as_it_is() -> None:
    """In another process, as they stay there."""
    program = (
        "from chaos import bugs\nfor name in bugs.BUGS: bugs.plant(name)\nprint(len(bugs.BUGS))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(len(BUGS)), done.stderr


def test_what_is_said_of_faults_is_said_of_such_that_exist() -> None:
    assert set(FAULTS) >= SILENCES | CUTS | DEADLY | STRANGERS | USURPED
    assert {TERMINATED, INTERRUPTED} <= set(FAULTS)


def test_the_docs_name_each_check() -> None:
    for name in CHECKS:
        assert f"`{name}`" in DOCS


@pytest.mark.parametrize("kind", FAULTS)
def test_the_docs_name_each_fault(kind: str) -> None:
    table = DOCS[DOCS.index("## The faults") : DOCS.index("**To add one**")]
    parts = kind.replace("kill ", "").replace(" in a verb", "")
    assert parts in table


def test_one_kind_alone_is_asked_for_by_its_name() -> None:
    command = [sys.executable, "-m", "chaos", "fault", "nonsense"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.splitlines() == list(FAULTS)
    planned = alone("loss", 3)
    assert [fault.kind for fault in planned.faults] == ["loss"] * 3
    assert planned.apart
