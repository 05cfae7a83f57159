"""Each deliberate bug is found, by the check that is there for it, within a few seeds."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, Mutant

from tensorhub_p2p.sim.cluster import checks
from tensorhub_p2p.sim.cluster.seeds import CheckFailed

SEEDS = 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_bug_is_found(mutant: Mutant) -> None:
    for seed in range(mutant.first, mutant.first + SEEDS):
        with mutant.apply():
            try:
                mutant.run(seed).carry_out()
            except CheckFailed as failure:
                if failure.check == mutant.check.__name__:
                    return
    pytest.fail(f"{mutant.check.__name__} didn't find it in {SEEDS} seeds from {mutant.first}")


def test_every_check_has_a_bug_that_it_must_find() -> None:
    assert {mutant.check for mutant in MUTANTS} == set(checks.STEADY)
