"""Which of a peer's addresses is dialled, and where nobody's listening proves something."""

from __future__ import annotations

import threading

import pytest
from runtime_echo import PATIENCE

from tensorhub_p2p.runtime import resolving
from tensorhub_p2p.runtime.addresses import Address, AddressError
from tensorhub_p2p.runtime.routes import Routes

ONE, TWO = "10.0.0.1:1", "10.0.0.2:2"


def test_a_failure_moves_on_to_the_next_address_and_round() -> None:
    routes = Routes(9, 0.5)
    route = routes.find((ONE, TWO), 0.0)
    assert route.current == ONE
    routes.failed(ONE, 0.0)
    assert route.current == TWO
    routes.failed(ONE, 0.0)
    assert route.current == TWO, "a late failure of another address"
    routes.failed(TWO, 0.0)
    assert route.current == ONE


def test_nobody_there_proves_a_death_at_the_only_address_or_at_one_that_worked() -> None:
    routes = Routes(9, 0.5)
    assert routes.is_proof((ONE,), ONE)
    routes.find((ONE,), 0.0)
    assert routes.is_proof((ONE,), ONE)
    both = (ONE, TWO)
    assert not routes.is_proof(both, ONE)
    routes.find(both, 0.0)
    assert not routes.is_proof(both, ONE)
    routes.worked(ONE)
    assert routes.is_proof(both, ONE)
    assert not routes.is_proof(both, TWO)


def test_names_are_looked_up_and_looked_up_again_when_all_their_addresses_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [[Address("10.0.0.1", 1)], [Address("10.0.0.9", 1)]]
    monkeypatch.setattr(resolving, "resolve", lambda address: answers.pop(0))
    routes, woken = Routes(9, 0.5), threading.Event()
    routes.attach(woken.set)
    route = routes.find(("seed:1",), 0.0)
    assert route.current is None
    assert woken.wait(PATIENCE)
    assert routes.resolved(0.0) == [route]
    assert route.current == ONE
    woken.clear()
    routes.failed(ONE, 1.0)
    assert not answers[1:]
    routes.failed(ONE, 100.0)
    assert woken.wait(PATIENCE)
    assert routes.resolved(100.0) == [route]
    assert route.current == "10.0.0.9:1"


def test_an_address_that_cannot_be_dialled_is_an_error() -> None:
    with pytest.raises(AddressError):
        Routes(9, 0.5).find(("0.0.0.0:1",), 0.0)


def test_the_least_recently_used_route_is_forgotten() -> None:
    routes = Routes(2, 0.5)
    for destination in ((ONE,), (TWO,), (ONE,), ("10.0.0.3:3",)):
        routes.find(destination, 0.0)
    assert routes.get((TWO,)) is None
    assert routes.get((ONE,)) is not None
