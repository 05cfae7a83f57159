"""What a new owner owes, and when it is paid."""

from __future__ import annotations

from tensorhub_p2p.protocol.directory.ring import Ring
from tensorhub_p2p.protocol.directory.warming import MAX_SETS, Debts, Past
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Key

A, B, C, D, E, F = (PeerId(name) for name in "ABCDEF")


def everyone(_peer: PeerId) -> bool:
    return True


def test_a_new_owner_owes_the_set_before_until_a_majority_of_it_answered() -> None:
    debts = Debts(D, (A, B, C))
    debts.move((B, C, D))
    assert not debts.settle(0.0, everyone)
    assert debts.to_ask(everyone) == [A, B, C]
    debts.told(B, ())
    assert not debts.settle(0.0, everyone)
    debts.told(C, ())
    assert debts.settle(0.0, everyone)
    assert debts.warm


def test_an_owner_that_stays_owes_nothing() -> None:
    debts = Debts(C, (A, B, C))
    debts.move((B, C, D))
    assert debts.settle(0.0, everyone)


def test_what_the_asked_owe_is_owed_too_down_to_the_first_set() -> None:
    debts = Debts(F, (C, D, E))
    debts.move((D, E, F))
    debts.told(D, ((D, E, F), (B, C, D)))
    debts.told(E, ())
    assert not debts.settle(0.0, everyone)
    assert debts.to_ask(everyone) == [B, C], "D answered already"
    debts.told(C, ((A, B, C),))
    assert not debts.settle(0.0, everyone)
    debts.told(B, ((B, C, D),))
    assert debts.settle(0.0, everyone)


def test_sets_that_were_settled_are_not_owed_again_when_others_name_them() -> None:
    debts = Debts(D, (A, B, C))
    debts.move((B, C, D))
    debts.owe((A, E))
    for peer in (A, B):
        debts.told(peer, ())
    debts.settle(0.0, everyone)
    debts.told(E, ((C, B, A),))
    assert debts.settle(0.0, everyone)


def test_where_deaths_rule_a_majority_out_all_survivors_suffice() -> None:
    debts = Debts(D, (A, B, C))
    debts.move((B, C, D))
    only_c = {C, D}.__contains__
    assert not debts.settle(0.0, only_c)
    debts.told(C, ())
    assert debts.settle(0.0, only_c)


def test_a_set_that_died_out_is_not_waited_for() -> None:
    debts = Debts(D, (A, B, C))
    debts.move((D, E, F))
    assert debts.settle(0.0, {D, E, F}.__contains__)


def test_answers_from_before_a_change_do_not_count_after_it() -> None:
    debts = Debts(D, (A, B, C))
    debts.move((B, C, D))
    debts.told(B, ())
    debts.move((C, D, E))
    debts.told(C, ())
    assert not debts.settle(0.0, everyone), "B may have taken writes since"
    debts.told(B, ())
    assert debts.settle(0.0, everyone)


def test_a_debt_may_lapse() -> None:
    debts = Debts(A, (A, B, C))
    debts.owe((D, E), lapse=1.0)
    assert not debts.settle(0.9, everyone)
    assert debts.settle(1.0, everyone)


def test_a_closed_key_opens_only_after_it_merged_from_its_successor() -> None:
    debts = Debts(A, (A, B, C))
    debts.close(1.0, (C, D, E))
    debts.reopen(0.9)
    assert debts.closed
    assert debts.warm, "nothing is asked of the successor before its time"
    debts.reopen(1.0)
    assert not debts.settle(1.0, everyone)
    assert debts.closed
    for peer in (D, E):
        debts.told(peer, ())
    assert debts.settle(1.0, everyone)
    assert not debts.closed


def test_a_closed_key_opens_when_the_own_view_moves_on_and_owes_another_successor() -> None:
    debts = Debts(C, (A, B, C))
    debts.close(1.0, (C, D, E))
    debts.move((C, E, D))
    assert not debts.closed
    assert debts.settle(0.0, everyone)
    debts.close(1.0, (A, D, E))
    debts.move((C, D, F))
    assert not debts.closed
    assert debts.to_ask(everyone) == [A, D, E]


def test_debts_are_bounded() -> None:
    debts = Debts(A, (A, B, C))
    debts.told(B, tuple((PeerId(f"x{i}"),) for i in range(1000)))
    assert len(debts.owed) == MAX_SETS


def test_a_first_touch_owes_the_sets_of_history_that_the_peer_was_not_in() -> None:
    key, past = Key("versions", "policy"), Past()
    for ring in (Ring([], 8), Ring([D], 8), Ring([A, B, C], 8)):
        past.add(ring)
    assert list(past.debts(D, key, 3, (A, B, D)).owed) == [(A, B, C)]
    assert Past().debts(D, key, 3, (D,)).settle(0.0, everyone)
