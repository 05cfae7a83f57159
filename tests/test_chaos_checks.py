"""The judge of the chaos suite: each check finds what it is for, and accuses nobody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaos import journal, judge
from chaos.checks import CHECKS, endings, violations
from chaos.checks.content import ONCE_MORE
from chaos.history import history
from chaos.journal import (
    AnyEvent,
    Called,
    Compared,
    Ended,
    Exited,
    Fault,
    Journal,
    Listed,
    Met,
    Phase,
    Sampled,
    Spoilt,
    Started,
    Trouble,
)
from chaos.worker import CLOSE_SECONDS


@dataclass
class Story:
    """A run, told event by event."""

    events: list[AnyEvent] = field(default_factory=list)
    calls: int = 0
    faults: int = 0

    def start(
        self,
        who: str,
        at: float = 0.0,
        role: str = "rollout",
        replica: str = "",
        shard: int = 0,
        num_shards: int = 1,
        **more: Any,
    ) -> None:
        replica = replica or who.rpartition(".")[0]
        told: dict[str, Any] = {"zone": "a", "host": "h0", "pid": 1, **more}
        self.events.append(
            Started(
                at=at,
                who=who,
                role=role,
                replica=replica,
                shard=shard,
                num_shards=num_shards,
                **told,
            )
        )

    def verb(
        self,
        who: str,
        verb: str,
        what: object,
        began: float,
        over: float | None,
        wrong: tuple[str, ...] = (),
        timeout: float = 10.0,
        **ended: Any,
    ) -> None:
        self.calls += 1
        number = self.calls
        called = Called(at=began, who=who, call=number, verb=verb, what=str(what), timeout=timeout)
        self.events.append(called)
        if over is None:
            return
        self.events.append(Ended(at=over, who=who, call=number, **ended))
        if verb == "replicate" and not ended.get("error"):
            version = ended["version"]
            self.events.append(
                Compared(at=over, who=who, call=number, version=version, wrong=wrong)
            )

    def pull(
        self,
        who: str,
        version: int,
        began: float,
        over: float,
        what: object = "latest",
        **more: Any,
    ) -> None:
        self.verb(who, "replicate", what, began, over, version=version, **more)

    def hold(self, who: str, version: int, since: float, until: float) -> None:
        """Published, and taken back."""
        self.verb(who, "publish", version, since, since + 0.01)
        self.verb(who, "unpublish", "", until - 0.01, until)

    def fault(self, kind: str, targets: tuple[str, ...], begin: float, end: float) -> None:
        self.faults += 1
        for at, ends in ((begin, False), (end, True)):
            self.events.append(
                Fault(
                    at=at, who="runner", number=self.faults, kind=kind, ends=ends, targets=targets
                )
            )

    def exit(self, who: str, at: float, code: int) -> None:
        self.events.append(Exited(at=at, who="runner", name=who, code=code))

    def phase(self, name: str, at: float, detail: str = "") -> None:
        self.events.append(Phase(at=at, who="runner", phase=name, detail=detail))

    def found(self) -> set[str]:
        """The checks that found something."""
        told = sorted(self.events, key=lambda event: event.at)
        return {violation.check for violation in violations(history(told))}


def calm_run() -> Story:
    """Nothing is wrong in it: a trainer, a rollout, three versions."""
    story = Story()
    story.start("t.1", role="trainer")
    story.start("r.1")
    story.phase("begun", 0.5)
    for version in range(3):
        story.hold("t.1", version, 1.0 + 2 * version, 2.9 + 2 * version)
        story.pull("r.1", version, 1.5 + 2 * version, 1.7 + 2 * version)
    story.phase("calm", 3.0)
    story.phase("closing", 10.0)
    for who in ("t.1", "r.1"):
        story.exit(who, 11.0, 0)
    story.phase("over", 12.0)
    return story


def wrong_bytes(story: Story) -> None:
    story.pull("r.1", 2, 5.8, 5.9, wrong=("layer0",))


def another_number(story: Story) -> None:
    story.pull("r.1", 2, 5.8, 5.9, what=1)


def nothing_newer(story: Story) -> None:
    story.verb("r.1", "wait_for", 2, 5.8, 5.9, version=2)


def the_newest_as_the_one_before(story: Story) -> None:
    story.pull("r.1", 2, 5.8, 5.9, what="latest-1")


def a_conflict(story: Story) -> None:
    message = "can't publish version 2 by t: version 2 by u exists. Publish a higher one"
    story.verb("t.1", "publish", 2, 8.0, 8.1, error="VersionConflict", message=message)


def other_bytes(story: Story) -> None:
    message = "version 2 by t is not published any more: its bytes are not those of version 2 by u"
    story.verb("t.1", "unpublish", "", 8.0, 8.1, error="VersionConflict", message=message)


def wrong_bytes_on_the_way(story: Story) -> None:
    story.pull("r.1", 2, 5.8, 5.9, mismatched=("t.1",))


def an_integrity_error(story: Story) -> None:
    story.verb("r.1", "replicate", "latest", 5.8, 5.9, error="IntegrityError")


def two_publications(story: Story) -> None:
    for shard in (0, 1):
        who = f"g{shard}.1"
        story.start(who, replica="g", shard=shard, num_shards=2)
        story.exit(who, 11.0, 0)
        story.pull(who, 2, 5.5, 5.8, generation="g1", number=1, publication=f"v2 of t{shard}")


def a_generation_later(story: Story) -> None:
    story.start("g.1", replica="g", num_shards=2)
    story.exit("g.1", 11.0, 0)
    for generation, at in (("g1", 5.5), ("g2", 5.8)):
        story.pull("g.1", 2, at, at + 0.1, generation=generation, number=1)


def never_whole(story: Story) -> None:
    """Two shards that were not there at the same time."""
    for shard in (0, 1):
        story.start(f"w{shard}.1", role="trainer", replica="w", shard=shard, num_shards=2)
        story.exit(f"w{shard}.1", 11.0, 0)
        story.hold(f"w{shard}.1", 7, 6.0 + shard, 6.5 + shard)
        story.hold(f"w{shard}.1", 8, 8.0, 8.5)
    story.pull("r.1", 7, 7.1, 7.2)


def backwards(story: Story) -> None:
    story.pull("r.1", 1, 5.8, 5.9)


def stale(story: Story) -> None:
    story.start("s.1")
    story.exit("s.1", 11.0, 0)
    story.pull("s.1", 1, 5.5, 5.9)


def lost(story: Story) -> None:
    story.start("k.1", newest=3, role="keeper")
    story.verb("k.1", "open", "k", 0.1, 0.2)
    story.pull("k.1", 2, 6.0, 6.1)
    story.exit("k.1", 11.0, 0)
    for at in (6.4, 7.0, 7.6):
        story.events.append(Listed(at=at, who="k.1", found=((0, 2, True), (0, 1, False))))


def replaced(story: Story) -> None:
    story.verb("r.1", "open", "r", 0.1, 0.2)
    story.start("r.2", at=5.0)
    story.verb("r.2", "open", "r", 5.0, 5.1)
    story.pull("r.2", 2, 6.0, 6.1)
    story.exit("r.2", 11.0, 0)
    story.pull("r.1", 2, 6.2, 6.3)


def endless(story: Story) -> None:
    story.verb("r.1", "replicate", "latest", 0.9, None, timeout=0.1)


def deaf_to_sigterm(story: Story) -> None:
    story.start("x.1", role="elastic")
    story.fault("SIGTERM in a verb", ("x.1",), 1.6, 5.0)
    story.phase("closing", 40.0)
    story.exit("x.1", 41.0, 0)


def busy_after_sigterm(story: Story) -> None:
    """It is killed before it would have had to end."""
    story.start("x.1", role="elastic")
    story.fault("SIGTERM in a verb", ("x.1",), 1.6, 2.0)
    story.pull("x.1", 2, 6.0, 6.1)
    story.fault("kill a puller", ("x.1",), 6.5, 7.0)
    story.exit("x.1", 6.5, -9)


def deaf_to_ctrl_c(story: Story) -> None:
    story.verb("r.1", "replicate", "latest", 0.3, 9.9, timeout=20.0, error="Timeout")
    story.fault("Ctrl-C in a verb", ("r.1",), 1.0, 1.1)


def halves(story: Story) -> None:
    for who, names in (("t.1", ("t.1",)), ("r.1", ("t.1", "r.1"))):
        story.verb(who, "join", "", 0.1, 0.2)
        story.events.append(Met(at=10.0, who=who, names=names))


def for_no_reason(story: Story) -> None:
    """What is newer than 1 is published while it waits, and it is not told."""
    story.verb("r.1", "wait_for", 1, 4.0, 9.0, timeout=5.0, error="Timeout")


def untyped(story: Story) -> None:
    story.events.append(Trouble(at=5.0, who="r.1", what="KeyError"))


def dull(story: Story) -> None:
    story.start("d.1")
    story.exit("d.1", 11.0, 0)
    story.verb("d.1", "replicate", "latest", 4.0, 5.0, error="Timeout")


def a_crash(story: Story) -> None:
    story.start("c.1", role="elastic")
    story.exit("c.1", 5.0, -11)


def who_stays(story: Story) -> None:
    story.phase("over", 13.0, "r.1")


def growth(story: Story, until: float = 9.9) -> None:
    for at, rss in ((9.0, 100 << 20), (until, 300 << 20)):
        story.events.append(
            Sampled(at=at, who="runner", name="r.1", rss=rss, descriptors=10, threads=10)
        )


BROKEN: list[tuple[Callable[[Story], None], str]] = [
    (wrong_bytes, "right_bytes"),
    (another_number, "the_version_that_was_asked_for"),
    (nothing_newer, "the_version_that_was_asked_for"),
    (the_newest_as_the_one_before, "the_version_that_was_asked_for"),
    (a_conflict, "no_conflict_over_equal_bytes"),
    (other_bytes, "no_conflict_over_equal_bytes"),
    (wrong_bytes_on_the_way, "nobody_reads_what_was_taken_back"),
    (an_integrity_error, "nobody_reads_what_was_taken_back"),
    (two_publications, "one_publication_for_a_call"),
    (a_generation_later, "no_end_of_a_generation_unnoticed"),
    (never_whole, "whole_versions_only"),
    (backwards, "never_backwards"),
    (stale, "fresh"),
    (lost, "retained_versions_stay"),
    (replaced, "who_was_replaced_changes_nothing"),
    (endless, "no_hang"),
    (deaf_to_sigterm, "who_is_told_to_stop_does"),
    (busy_after_sigterm, "who_is_told_to_stop_does"),
    (deaf_to_ctrl_c, "who_is_told_to_stop_does"),
    (untyped, "only_typed_errors"),
    (halves, "all_know_each_other_once_it_is_calm"),
    (for_no_reason, "nothing_fails_without_a_cause"),
    (dull, "lively_once_it_is_calm"),
    (a_crash, "every_end_is_one_that_was_meant"),
    (who_stays, "every_end_is_one_that_was_meant"),
    (growth, "nothing_grows"),
]


def test_a_run_in_which_nothing_is_wrong_is_accused_of_nothing() -> None:
    assert calm_run().found() == set()


@pytest.mark.parametrize(
    ("breaks", "check"), BROKEN, ids=lambda what: getattr(what, "__name__", what)
)
def test_what_is_broken_is_found(breaks: Callable[[Story], None], check: str) -> None:
    story = calm_run()
    breaks(story)
    assert check in story.found()


def test_each_check_is_seen_to_find_something() -> None:
    assert {check for _, check in BROKEN} == set(CHECKS)


def group_whose_leader_dies(first: int, then: int, had: tuple[float, float]) -> Story:
    """Two shards get a version, the leader dies, and its successor and the survivor get another."""
    story = calm_run()
    for shard, over in enumerate(had):
        story.start(f"g{shard}.1", replica="g", shard=shard, num_shards=2)
        story.pull(f"g{shard}.1", first, 5.5, over, generation="g1", number=1)
    story.fault("kill a leader", ("g0.1",), 5.8, 5.9)
    story.exit("g0.1", 5.8, -9)
    story.verb("g1.1", "replicate", "latest", 5.75, 6.4, error="GroupBroken")
    story.start("g0.2", at=6.0, replica="g", shard=0, num_shards=2)
    for who in ("g0.2", "g1.1"):
        story.pull(who, then, 6.5, 6.6, generation="g2", number=1)
        story.exit(who, 11.0, 0)
    return story


@pytest.mark.parametrize("had", [(5.6, 5.7), (5.7, 5.6)], ids=["leader first", "leader last"])
@pytest.mark.parametrize(("then", "backwards"), [(1, True), (2, False)])
def test_a_survivor_remembers_whoever_had_it_first(
    had: tuple[float, float], then: int, backwards: bool
) -> None:
    assert ("never_backwards" in group_whose_leader_dies(2, then, had).found()) is backwards


@pytest.mark.parametrize(
    ("dies", "cut", "backwards"), [(12.0, False, True), (12.0, True, False), (6.5, False, False)]
)
def test_what_was_on_record_outlives_a_replica(dies: float, cut: bool, backwards: bool) -> None:
    """Unless it died before it was, or there was a cut."""
    story = calm_run()
    story.start("x.1")
    story.pull("x.1", 2, 5.5, 5.6)
    story.fault("kill a puller", ("x.1",), dies, dies + 0.1)
    story.exit("x.1", dies, -9)
    if cut:
        story.fault("partition", ("t.1",), 7.0, 8.0)
    story.start("x.2", at=dies + 1.0)
    story.pull("x.2", 1, dies + 2.0, dies + 2.1)
    story.exit("x.2", 20.0, 0)
    assert ("never_backwards" in story.found()) is backwards


@pytest.mark.parametrize(("stopped", "backwards"), [(12.0, True), (6.5, False)])
def test_who_takes_the_slot_of_a_stopped_process_has_the_record_only(
    stopped: float, backwards: bool
) -> None:
    story = calm_run()
    story.start("x.1")
    story.pull("x.1", 2, 5.5, 5.6)
    story.fault("usurp a slot", ("x.1", "x.2"), stopped, stopped + 4.0)
    story.start("x.2", at=stopped + 1.0)
    story.pull("x.2", 1, stopped + 2.0, stopped + 2.1)
    story.exit("x.1", 20.0, 0)
    story.exit("x.2", 20.0, 0)
    assert ("never_backwards" in story.found()) is backwards


@pytest.mark.parametrize(
    ("kind", "code", "meant"),
    [
        ("clock jump", -9, False),
        ("kill a source", -9, True),
        ("clock jump", -15, False),
        ("SIGTERM in a verb", -15, True),
    ],
)
def test_only_who_was_killed_may_end_by_a_signal(kind: str, code: int, meant: bool) -> None:
    story = calm_run()
    story.start("x.1", role="elastic")
    story.fault(kind, ("x.1",), 2.0, 3.0)
    story.exit("x.1", 2.5, code)
    assert ("every_end_is_one_that_was_meant" not in story.found()) is meant


@pytest.mark.parametrize(
    ("kind", "meant"), [("kill a source", False), ("a stranger on a seed's port", True)]
)
def test_who_can_not_go_on_has_a_reason(kind: str, meant: bool) -> None:
    """A death elsewhere is none: its successor has to come in."""
    story = calm_run()
    story.start("x.1", role="elastic")
    story.fault(kind, ("x.1",), 2.0, 3.0)
    story.exit("x.1", 2.0, -9)
    story.start("x.2", at=3.0, role="elastic")
    story.verb("x.2", "join", "", 3.1, 3.2, error="JoinError")
    story.exit("x.2", 3.3, 2)
    assert ("every_end_is_one_that_was_meant" not in story.found()) is meant


@pytest.mark.parametrize("replaced", [True, False])
def test_who_was_replaced_fails_whenever_it_comes_back(replaced: bool) -> None:
    story = calm_run()
    if replaced:
        story.start("r.2", at=1.0)
        story.exit("r.2", 11.0, 0)
    story.verb("r.1", "replicate", "latest", 8.5, 8.6, error="SlotTaken")
    assert ("nothing_fails_without_a_cause" not in story.found()) is replaced


@pytest.mark.parametrize("fault", ["stop", "partition", "kill a source"])
def test_beside_a_fault_a_verb_may_fail(fault: str) -> None:
    story = calm_run()
    story.start("x.1", role="elastic")
    story.exit("x.1", 11.0, 0)
    story.fault(fault, ("x.1",), 5.0, 5.5)
    for_no_reason(story)
    assert "nothing_fails_without_a_cause" not in story.found()


@pytest.mark.parametrize(
    ("began", "over", "lively"), [(1.0, 4.0, True), (9.0, 10.5, True), (1.0, 2.9, False)]
)
def test_a_slow_pull_is_a_sign_of_life(began: float, over: float, lively: bool) -> None:
    """The calm is from 3 to 10: it may begin before, or end after that."""
    story = calm_run()
    story.start("d.1")
    story.exit("d.1", 11.0, 0)
    story.pull("d.1", 1, began, over, what=1)
    assert ("lively_once_it_is_calm" not in story.found()) is lively


@pytest.mark.parametrize(("state", "found"), [("PUBLISHED", True), ("TORN", False)])
def test_a_failed_pull_leaves_what_was_there_or_says_that_it_is_torn(
    state: str, found: bool
) -> None:
    story = calm_run()
    story.verb("r.1", "replicate", 7, 5.8, 5.9, error="Timeout", state=state)
    if state == "PUBLISHED":
        compared = Compared(at=5.9, who="r.1", call=story.calls, version=2, wrong=("layer0",))
        story.events.append(compared)
    assert ("right_bytes" in story.found()) is found


def test_bits_that_flip_when_a_pull_has_just_begun_are_not_the_pulls() -> None:
    story = calm_run()
    story.events.append(Spoilt(at=5.79, who="r.1", version=1))
    story.pull("r.1", 2, 5.8, 5.9, wrong=("layer0",))
    assert story.found() == set()


@pytest.mark.parametrize(("until", "stale"), [(9.0, True), (6.0, False)])
def test_what_others_hold_is_found_without_its_publisher(until: float, stale: bool) -> None:
    """One that has the newest, and gives it up or not, while the next one asks."""
    story = calm_run()
    for who in ("h.1", "s.1"):
        story.start(who)
        story.exit(who, 11.0, 0)
    story.pull("h.1", 2, 5.1, 5.2, state="PUBLISHED")
    story.verb("h.1", "unpublish", "", until, until + 0.1)
    story.pull("s.1", 1, 7.5, 7.9)
    assert ("fresh" in story.found()) is stale


def test_the_long_dead_are_not_among_the_living() -> None:
    story = calm_run()
    story.start("x.1", at=-20.0, role="elastic")
    story.exit("x.1", -10.0, 0)
    story.verb("r.1", "join", "", 0.1, 0.2)
    story.events.append(Met(at=10.0, who="r.1", names=("t.1", "r.1", "x.1")))
    assert story.found() == {"all_know_each_other_once_it_is_calm"}


# --- what is not promised ---


def test_who_is_left_at_the_end_takes_over_what_others_kept() -> None:
    story = calm_run()
    growth(story, until=10.5)
    assert story.found() == set()


def test_a_process_is_replaced_once_its_successor_works() -> None:
    story = calm_run()
    story.verb("r.1", "open", "r", 0.1, 0.2)
    story.start("r.2", at=5.0)
    story.verb("r.2", "open", "r", 5.0, 5.1)
    story.exit("r.2", 11.0, 0)
    story.pull("r.1", 2, 5.6, 5.7)
    assert "who_was_replaced_changes_nothing" not in story.found()


def test_who_publishes_an_old_version_is_in_conflict_with_newer_ones() -> None:
    story = calm_run()
    message = "can't publish version 1 by t: version 2 by u exists. Publish a higher version"
    story.verb("t.1", "publish", 1, 8.0, 8.1, error="VersionConflict", message=message)
    assert "no_conflict_over_equal_bytes" not in story.found()


@pytest.mark.parametrize("before", [True, False])
def test_who_is_started_again_may_publish_for_a_second_time(before: bool) -> None:
    story = calm_run()
    story.start("u.1")
    story.start("u.2", at=7.0)
    if before:
        story.verb("u.1", "publish", 3, 6.0, None)
    message = f"can't publish version 3 by u: {ONCE_MORE}"
    story.verb("u.2", "publish", 3, 8.0, 8.1, error="VersionConflict", message=message)
    assert ("no_conflict_over_equal_bytes" not in story.found()) is before


def test_spoilt_bytes_may_be_in_conflict_with_others() -> None:
    story = calm_run()
    story.events.append(Spoilt(at=5.2, who="r.1", version=2))
    a_conflict(story)
    assert "no_conflict_over_equal_bytes" not in story.found()


@pytest.mark.parametrize(("what", "version"), [("latest-1", 1), (1, 1)])
def test_an_older_one_is_right_if_it_was_asked_for(what: object, version: int) -> None:
    story = calm_run()
    story.pull("r.1", version, 5.8, 5.9, what=what)
    assert "the_version_that_was_asked_for" not in story.found()


def test_whose_own_memory_was_spoilt_is_not_accused_before_it_pulls_anew() -> None:
    story = calm_run()
    story.events.append(Spoilt(at=5.75, who="r.1", version=2))
    story.pull("r.1", 2, 5.8, 5.9, wrong=("layer0",), up_to_date=True)
    assert story.found() == set()
    story.pull("r.1", 3, 6.8, 6.9, wrong=("layer0",))
    assert "right_bytes" in story.found()


def test_a_source_whose_memory_was_spoilt_may_send_wrong_bytes() -> None:
    story = calm_run()
    story.events.append(Spoilt(at=5.2, who="t.1", version=2))
    wrong_bytes_on_the_way(story)
    assert story.found() == set()


def test_behind_a_cut_nobody_has_to_know_what_is_new() -> None:
    story = calm_run()
    story.fault("partition", ("s.1",), 5.2, 5.4)
    stale(story)
    assert "fresh" not in story.found()


def test_a_copy_that_died_is_not_asked_for() -> None:
    story = calm_run()
    story.start("x.1")
    story.fault("kill a source", ("x.1",), 5.0, 6.0)
    story.exit("x.1", 5.0, -9)
    lost(story)
    assert "retained_versions_stay" not in story.found()


@pytest.mark.parametrize(("since", "retained"), [(1.5, True), (2.5, False)])
def test_only_what_was_whole_at_one_time_is_retained(since: float, retained: bool) -> None:
    story = Story()
    for who, shard in (("p.1", 0), ("q.1", 1)):
        story.start(who, role="trainer", replica="p", shard=shard, num_shards=2)
    story.start("k.1", role="keeper", newest=3)
    story.verb("k.1", "open", "k", 0.1, 0.2)
    story.hold("p.1", 1, 1.0, 2.0)
    story.hold("q.1", 1, since, 3.0)
    for who in ("p.1", "q.1"):
        story.hold(who, 2, 4.0, 5.0)
        story.exit(who, 9.0, 0)
    for at in (6.4, 7.0, 7.6):
        story.events.append(Listed(at=at, who="k.1", found=((0, 2, True),)))
    story.exit("k.1", 9.0, 0)
    assert ("retained_versions_stay" in story.found()) is retained


def test_time_in_which_a_process_was_stopped_counts_for_no_deadline() -> None:
    story = calm_run()
    story.fault("stop", ("r.1",), 3.5, 9.0)
    story.verb("r.1", "replicate", "latest", 3.2, 10.0, timeout=2.0, error="Timeout")
    assert "no_hang" not in story.found()


def test_who_was_killed_on_purpose_may_end_so() -> None:
    story = calm_run()
    story.start("x.1")
    story.fault("kill a puller", ("x.1",), 2.0, 3.0)
    story.exit("x.1", 2.0, -9)
    assert story.found() == set()


@pytest.mark.parametrize(("kind", "meant"), [("memory pressure", True), ("loss", False)])
def test_who_gets_no_memory_may_abort(kind: str, meant: bool) -> None:
    story = calm_run()
    story.start("x.1")
    story.fault(kind, ("x.1",), 2.0, 3.0)
    story.exit("x.1", 2.5, -6)
    assert story.found() == (set() if meant else {"every_end_is_one_that_was_meant"})


def test_what_has_no_end_is_told_at_the_end_of_the_run() -> None:
    """As infinity can't be written down."""
    story = calm_run()
    story.start("x.1", role="elastic")
    told = history(sorted(story.events, key=lambda event: event.at))
    (found,) = violations(told)
    assert (found.check, found.at) == ("every_end_is_one_that_was_meant", told.last)


@pytest.mark.parametrize(
    ("kind", "what", "excused"),
    [
        ("memory pressure", "RuntimeError: can't start new thread", True),
        ("memory pressure", "KeyError: 7", False),
        ("loss", "RuntimeError: can't start new thread", False),
    ],
)
def test_who_gets_no_memory_may_say_so(kind: str, what: str, excused: bool) -> None:
    story = calm_run()
    story.fault(kind, ("r.1",), 2.0, 3.0)
    story.events.append(Trouble(at=2.5, who="r.1", what=what))
    assert ("only_typed_errors" not in story.found()) is excused


@pytest.mark.parametrize("spoilt", [True, False])
def test_the_other_shards_wait_for_who_can_not_give_up_its_last_copy(spoilt: bool) -> None:
    story = calm_run()
    for shard in (0, 1):
        who = f"d-{shard}.1"
        story.start(who, replica="d", shard=shard, num_shards=2)
        story.exit(who, 11.0, 0)
    if spoilt:
        story.events.append(Spoilt(at=2.0, who="d-1.1", version=0))
    story.verb("d-0.1", "replicate", "latest", 4.0, 9.0, error="Timeout")
    story.verb("d-1.1", "replicate", "latest", 4.0, 5.0, error="RetentionLost")
    assert ("lively_once_it_is_calm" not in story.found()) is spoilt


@pytest.mark.parametrize("spoilt", [True, False])
def test_a_last_copy_with_flipped_bits_can_not_be_given_up(spoilt: bool) -> None:
    story = calm_run()
    story.start("d.1")
    story.exit("d.1", 11.0, 0)
    if spoilt:
        story.events.append(Spoilt(at=2.0, who="d.1", version=0))
    story.verb("d.1", "replicate", "latest", 4.0, 5.0, error="RetentionLost")
    assert ("lively_once_it_is_calm" not in story.found()) is spoilt


def test_the_judge_knows_how_long_a_worker_may_take_to_close() -> None:
    """It doesn't import the workers, which import the library."""
    assert endings.TO_CLOSE == CLOSE_SECONDS


# --- journals ---


def test_the_judge_ends_as_what_it_found(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert judge.main([]) == 2
    assert judge.main([str(tmp_path)]) == 2, "no run was there"
    runner = Journal(tmp_path, journal.RUNNER)
    runner.write(Phase(at=1.0, who="runner", phase="begun"))
    assert judge.main([str(tmp_path)]) == 0
    runner.write(Trouble(at=2.0, who="runner", what="left behind"))
    assert judge.main([str(tmp_path)]) == 1
    assert capsysbinary.readouterr().out.startswith(b"[][{")


def test_what_is_written_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    first, second = Journal(tmp_path, "first"), Journal(tmp_path, "second")
    first.write(Trouble(at=1.0, who="first", what="early"))
    second.write(Trouble(at=3.0, who="second", what="late"))
    first.write(Phase(at=2.0, who="first", phase="calm"))
    assert [event.at for event in journal.read(tmp_path)] == [1.0, 2.0, 3.0]


def test_half_a_line_of_a_killed_process_is_left_out_and_anything_else_is_an_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "killed.jsonl").write_bytes(
        b'{"type":"Phase","at":1.0,"who":"a","phase":"x"}\n{"ty'
    )
    assert len(journal.read(tmp_path)) == 1
    (tmp_path / "killed.jsonl").write_bytes(b'{"ty\n{"type":"Phase"')
    with pytest.raises(msgspec.DecodeError):
        journal.read(tmp_path)
