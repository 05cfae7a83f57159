"""A layout that came in pages is not asked for again by the next pull."""

from __future__ import annotations

import pytest

from tensorhub_p2p.errors import LayoutMismatch
from tensorhub_p2p.protocol.identity import Generation, Group, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout, TensorSpec
from tensorhub_p2p.protocol.messages import LayoutPage, PullOffer
from tensorhub_p2p.protocol.pulls import pages
from tensorhub_p2p.protocol.pulls.pages import KnownLayouts, LayoutAgreement

PUBLICATION = Publication(0, 7, "trainer", Generation(1, 1))
SLOT = Slot(Group("policy", "trainer"), 0)


def layout(*names: str, size: int = 1 << 20) -> Layout:
    return Layout([TensorSpec(name, "uint8", (size,), size) for name in names])


OWN, THEIRS = layout("a", "b"), layout("b", "a")


def offer(of: Layout, **changes: object) -> PullOffer:
    good = {
        "pull": "p",
        "slot": SLOT,
        "publication": PUBLICATION,
        "granted": True,
        "layout": of.digest,
        "num_bytes": of.num_bytes,
        "chunk_bytes": of.chunk_bytes,
        "have": b"\3",
        "known": b"",
        "digests": b"",
        "endpoints": (),
    }
    return PullOffer(**(good | changes))  # type: ignore[arg-type]


def page(of: Layout) -> LayoutPage:
    return LayoutPage("p", SLOT, 0, len(of.tensors), of.tensors)


def test_pages_cross_once_and_the_next_agreement_finds_the_layout_at_once() -> None:
    known = KnownLayouts()
    first = LayoutAgreement(OWN, known)
    first.settle(offer(THEIRS))
    assert first.next == 0
    assert first.add(page(THEIRS))
    for own in (OWN, None):
        second = LayoutAgreement(own, known)
        second.settle(offer(THEIRS))
        assert second.next is None
        assert second.found == THEIRS


def test_ones_own_layout_is_never_asked_for_and_not_remembered() -> None:
    known = KnownLayouts()
    agreement = LayoutAgreement(OWN, known)
    agreement.settle(offer(OWN))
    assert agreement.found is OWN
    assert known.get(OWN.digest) is None


def test_a_known_layout_does_not_make_a_false_offer_sound() -> None:
    known = KnownLayouts()
    known.add(THEIRS)
    with pytest.raises(ValueError, match="bytes in chunks"):
        LayoutAgreement(OWN, known).grid(offer(THEIRS, num_bytes=5 << 20))


def test_pages_that_are_not_what_was_announced_are_not_remembered() -> None:
    known = KnownLayouts()
    agreement = LayoutAgreement(OWN, known)
    agreement.settle(offer(THEIRS))
    with pytest.raises(LayoutMismatch):
        agreement.add(page(layout("b", "c")))
    assert known.get(THEIRS.digest) is known.get(layout("b", "c").digest) is None


def test_few_layouts_are_remembered_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_KNOWN", 3)
    known = KnownLayouts()
    made = [layout(str(i)) for i in range(4)]
    for each in (*made, made[3]):
        known.add(each)
    assert [known.get(each.digest) for each in made] == [None, *made[1:]]
    monkeypatch.setattr(pages, "MAX_KNOWN_TENSORS", 5)
    known.add(layout(*"abcd"))
    assert [known.get(each.digest) is None for each in made].count(True) == 3
