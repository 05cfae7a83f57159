"""What is reported of a chaos run: the arithmetic of stalls, the counts, and the timeline."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from chaos import figures, report, stalls, timeline
from chaos.checks import Violation
from chaos.history import history
from chaos.journal import (
    RUNNER,
    AnyEvent,
    Called,
    Ended,
    Exited,
    Fault,
    Phase,
    Sampled,
    Started,
)

_numbers = count(1)


def worker(who: str, role: str = "rollout", replica: str = "", at: float = 0.0) -> list[AnyEvent]:
    replica = replica or who.rpartition(".")[0]
    start = Started(
        at=at,
        who=who,
        pid=1,
        role=role,
        replica=replica,
        shard=0,
        num_shards=1,
        zone="a",
        host="",
    )
    return [start]


def verb(
    who: str, name: str, at: float, seconds: float, what: str = "", **end: object
) -> list[AnyEvent]:
    number = next(_numbers)
    ended = {"at": at + seconds, "who": who, "call": number, **end}
    return [
        Called(at=at, who=who, call=number, verb=name, what=what, timeout=20.0),
        msgspec.convert(ended, Ended, str_keys=False),
    ]


def pull(
    who: str, at: float, seconds: float, what: str = "latest", **end: object
) -> list[AnyEvent]:
    return verb(who, "replicate", at, seconds, what, **end)


def fault(kind: str, at: float, seconds: float, *targets: str, detail: str = "") -> list[AnyEvent]:
    number = next(_numbers)
    return [
        Fault(
            at=moment,
            who=RUNNER,
            number=number,
            kind=kind,
            ends=ends,
            targets=targets,
            detail=detail,
        )
        for moment, ends in ((at, False), (at + seconds, True))
    ]


def exited(who: str, at: float, code: int = -9) -> list[AnyEvent]:
    return [Exited(at=at, who=RUNNER, name=who, code=code)]


def phase(name: str, at: float) -> list[AnyEvent]:
    return [Phase(at=at, who=RUNNER, phase=name)]


def told(*parts: Iterable[AnyEvent]) -> list[AnyEvent]:
    return sorted((event for part in parts for event in part), key=lambda event: event.at)


def stalled(*parts: Iterable[AnyEvent]) -> dict[str, stalls.Stall]:
    events = told(*parts)
    return stalls.longest(history(events), events[0].at, seed=7)


def seconds(*parts: Iterable[AnyEvent]) -> dict[str, float]:
    """Of faults; how much pulls differ beside none has a test of its own."""
    found = {kind: round(stall.seconds, 6) for kind, stall in stalled(*parts).items()}
    found.pop(stalls.UNDISTURBED, None)
    return found


USUAL = told(
    worker("r1.1"),
    worker("r2.1"),
    worker("t1.1", "trainer"),
    pull("r1.1", 1.0, 0.2),
    pull("r1.1", 3.0, 0.3),
    pull("r2.1", 5.0, 0.7),
)
"""Undisturbed pulls, of which 0.3 s is the median; faults may begin at 10."""


# --- stalls ---


def test_a_stall_is_what_a_pull_takes_beyond_the_median_of_undisturbed_ones() -> None:
    found = stalled(USUAL, fault("stop", 10, 4, "t1.1"), pull("r1.1", 11, 2.8), pull("r2.1", 12, 1))
    stall = found["stop"]
    assert stall.seconds == pytest.approx(2.5)
    assert (stall.who, stall.at, stall.seed) == ("r1.1", 11.0, 7)


def test_the_time_of_a_stall_counts_from_the_first_event() -> None:
    late = worker("r1.1", at=1000.0)
    found = stalled(late, fault("stop", 1010, 1, "t1.1"), pull("r1.1", 1010.5, 2))
    assert found["stop"].at == pytest.approx(10.5)


def test_a_pull_faster_than_usual_is_no_negative_stall() -> None:
    assert seconds(USUAL, fault("stop", 10, 1, "t1.1"), pull("r1.1", 10.1, 0.1)) == {"stop": 0.0}


def test_a_fault_reaches_five_seconds_beyond_its_end() -> None:
    stop = fault("stop", 10, 1, "t1.1")
    assert seconds(USUAL, stop, pull("r1.1", 15.9, 1.3)) == {"stop": 1.0}
    assert seconds(USUAL, stop, pull("r1.1", 16.1, 1.3)) == {}


def test_a_pull_that_began_long_before_a_fault_overlaps_it() -> None:
    slow = pull("r1.1", 6, 20.3)
    assert seconds(USUAL, slow, pull("r2.1", 8, 0.3), fault("stop", 20, 1, "t1.1")) == {
        "stop": 20.0
    }


def test_of_several_faults_of_a_kind_the_longest_stall_remains() -> None:
    faults = told(fault("stop", 10, 1, "t1.1"), fault("stop", 30, 1, "t1.1"))
    pulls = told(pull("r1.1", 10.5, 4.3), pull("r1.1", 30.5, 2.3))
    assert seconds(USUAL, faults, pulls) == {"stop": 4.0}


def test_a_stall_is_set_down_to_all_faults_beside_it() -> None:
    faults = told(fault("stop", 10, 1, "t1.1"), fault("loss", 12, 1, "t1.1"))
    assert seconds(USUAL, faults, pull("r1.1", 10.5, 4.3)) == {"stop": 4.0, "loss": 4.0}


def test_the_time_of_pulls_that_failed_counts_until_one_succeeds() -> None:
    stop = fault("stop", 10, 1, "t1.1")
    tries = told(
        pull("r1.1", 10.5, 5.0, error="VersionUnavailable"),
        pull("r1.1", 15.8, 0.0, "17"),  # other questions, and rests, neither end nor lengthen it
        pull("r1.1", 16.1, 1.0, error="Timeout"),
        pull("r1.1", 17.2, 2.3),
        pull("r1.1", 19.6, 0.3),
    )
    found = stalled(USUAL, stop, tries)["stop"]
    assert found.seconds == pytest.approx(8.0)
    assert (found.at, found.error) == (10.5, "Timeout")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("r1.1", "it is a target"),
        ("r1.2", "another life of it is"),
        ("m2.1", "a member of its replica is"),
    ],
)
def test_who_is_hurt_or_belongs_to_who_is_hurt_is_no_bystander(target: str, why: str) -> None:
    group = told(worker("m1.1", replica="m"), worker("m2.1", replica="m"))
    puller = "m1.1" if target == "m2.1" else "r1.1"
    stop = fault("stop", 10, 1, target)
    assert seconds(USUAL, group, stop, pull(puller, 10.5, 9.3)) == {}, why
    assert seconds(USUAL, group, stop, pull("r2.1", 10.5, 9.3)) == {"stop": 9.0}


def test_what_another_fault_did_to_the_puller_is_not_set_down_to_this_one() -> None:
    faults = told(fault("kill", 10, 1, "t1.1"), fault("stop", 10, 8, "r1.1"))
    assert seconds(USUAL, faults, pull("r1.1", 10.5, 9.3), pull("r2.1", 10.5, 1.3)) == {
        "kill": 1.0,
        "stop": 1.0,
    }


def test_only_rollouts_are_bystanders() -> None:
    keeper = worker("k1.1", "keeper")
    assert seconds(USUAL, keeper, fault("stop", 10, 1, "t1.1"), pull("k1.1", 10.5, 9)) == {}


def test_only_pulls_stall() -> None:
    waited = verb("r1.1", "wait_for", 10.5, 9)
    assert seconds(USUAL, fault("stop", 10, 1, "t1.1"), waited) == {}


def test_pulls_that_bring_nothing_have_their_own_median() -> None:
    nothing = told(*(pull("r2.1", at, 0.01, up_to_date=True) for at in (6.0, 7.0, 8.0)))
    stop = fault("stop", 10, 1, "t1.1")
    for is_there, expected in ((True, 4.99), (False, 4.7)):
        stalled_one = pull("r1.1", 10.5, 5.0, up_to_date=is_there)
        assert seconds(USUAL, nothing, stop, stalled_one) == {"stop": expected}


def test_only_the_newest_is_sure_to_be_there() -> None:
    stop = fault("stop", 10, 1, "t1.1")
    for what in ("latest-1", "17"):
        assert seconds(USUAL, stop, pull("r1.1", 10.5, 4, what)) == {}


def test_the_longest_beside_no_fault_shows_how_much_pulls_differ() -> None:
    found = stalled(USUAL, fault("stop", 10, 1, "t1.1"), pull("r1.1", 30, 1.5))
    assert found[stalls.UNDISTURBED].seconds == pytest.approx(1.0)  # 0.5 s is usual now
    early = told(USUAL, phase("begun", 0.9), pull("r1.1", 0.1, 60.0))
    assert stalled(early)[stalls.UNDISTURBED].seconds == pytest.approx(0.4)


def test_failed_pulls_do_not_make_the_median() -> None:
    failed = told(*(pull("r2.1", 6, 2.0, error="Timeout") for _ in range(9)))
    stop = fault("stop", 10, 1, "t1.1")
    assert seconds(USUAL, failed, stop, pull("r1.1", 10.5, 1.3)) == {"stop": 1.0}


def test_where_all_pulls_were_disturbed_their_own_median_is_usual() -> None:
    pulls = told(pull("r1.1", 11, 1), pull("r1.1", 13, 1.5), pull("r1.1", 15, 4))
    workers = told(worker("r1.1"), worker("t1.1", "trainer"))
    assert seconds(workers, fault("stop", 10, 10, "t1.1"), pulls) == {"stop": 2.5}


def test_a_stall_that_ends_in_an_error_names_it() -> None:
    stop = fault("stop", 10, 1, "t1.1")
    latest = stalled(USUAL, stop, pull("r1.1", 10.5, 20.3, error="Timeout"))
    assert latest["stop"].seconds == pytest.approx(20.0)
    assert latest["stop"].error == "Timeout"


def test_a_pull_that_died_with_its_process_is_left_out() -> None:
    stop, (called, _) = fault("stop", 10, 1, "t1.1"), pull("r1.1", 10.5, 1)
    end = phase("over", 20.8)
    assert seconds(USUAL, stop, [called], exited("r1.1", 12), end) == {}
    assert seconds(USUAL, stop, [called], end) == {"stop": 10.0}  # it hangs to this day


# --- counts ---


def test_a_run_is_counted() -> None:
    events = told(
        worker("r1.1", at=100.0),
        pull("r1.1", 101, 1, bytes=1000, retried=2),
        pull("r1.1", 103, 1, bytes=500, retried=1),
        pull("r1.1", 105, 1, error="Timeout"),
        pull("r1.1", 107, 1, error="Timeout"),
        pull("r1.1", 109, 1, error="TransferError"),
        pull("r1.1", 111, 1)[:1],
        exited("r1.1", 111.5),
        worker("r1.2", at=112.0),
        verb("r1.2", "versions", 113, 1),
        fault("kill", 111.4, 0.6, "r1.1"),
        fault("stop", 113, 2.0, "r1.2"),
        fault("stop", 118, 1.5, "r1.2"),
        fault("loss", 129, 9.0, "r1.2")[:1],
        phase("over", 130.0),
    )
    broken = [Violation("G7", "no_hang", 120.0, "r1.2", "a"), Violation("G1", "x", 121.0, "", "b")]
    summary = report.summarise(events, broken, seed=5, leaked=["r1.2"])
    assert summary.seeds == [5]
    assert summary.seconds == pytest.approx(30.0)
    assert summary.processes == 2
    assert summary.verbs == 7
    assert summary.pulls == report.Pulls(
        succeeded=2,
        failed={"Timeout": 2, "TransferError": 1},
        unanswered=1,
        bytes=1500,
        retried=3,
    )
    faults = {name: (kind.count, round(kind.seconds, 6)) for name, kind in summary.faults.items()}
    assert faults == {"kill": (1, 0.6), "stop": (2, 3.5), "loss": (1, 1.0)}
    assert summary.hangs == 1
    assert summary.leaked == ["r1.2"]
    assert [breach.at for breach in summary.violations] == [20.0, 21.0]


def sample(who: str, at: float, rss: int, descriptors: int) -> AnyEvent:
    return Sampled(at=at, who=RUNNER, name=who, rss=rss, descriptors=descriptors, threads=1)


def test_growth_is_within_a_life_and_needs_two_samples() -> None:
    events = told(
        worker("r1.1"),
        worker("r1.2"),
        worker("r2.1"),
        [sample("r1.1", 1, 100, 10), sample("r1.1", 2, 900, 40), sample("r1.1", 3, 150, 12)],
        [sample("r1.2", 4, 5000, 50)],
        [sample("r2.1", 1, 200, 20), sample("r2.1", 3, 230, 19)],
    )
    summary = report.summarise(events, [], seed=1, leaked=[])
    assert summary.rss == report.Use(most=5000, growth=50, grown="r1.1")
    assert summary.descriptors == report.Use(most=50, growth=2, grown="r1.1")


def test_without_a_second_sample_no_growth_is_known() -> None:
    events = told(worker("r1.1"), [sample("r1.1", 1, 100, 10)])
    assert report.summarise(events, [], seed=1, leaked=[]).rss == report.Use(most=100)


def test_a_run_without_events_is_empty() -> None:
    assert report.summarise([], [], seed=3, leaked=[]) == report.Summary(seeds=[3])


def one(seed: int, stall: float, growth: int) -> report.Summary:
    events = told(
        USUAL,
        fault("stop", 10, 1, "t1.1"),
        pull("r1.1", 10.5, stall + 0.3, bytes=10, retried=1),
        pull("r1.1", 50, 1, error="Timeout"),
        [sample("r1.1", 1, 100, 10), sample("r1.1", 60, 100 + growth, 10)],
    )
    broken = [Violation("G1", "right_bytes", 51.0, "r1.1", "wrong")]
    return report.summarise(events, broken, seed=seed, leaked=["r9.1"])


def test_several_runs_are_added_and_the_longest_stall_and_the_most_growth_remain() -> None:
    both = report.combine([one(1, stall=2.0, growth=70), one(2, stall=3.0, growth=20)])
    assert both.seeds == [1, 2]
    assert both.seconds == pytest.approx(120.0)
    assert both.faults["stop"].count == 2
    stall = both.faults["stop"].stall
    assert stall is not None
    assert (round(stall.seconds, 6), stall.seed) == (3.0, 2)
    assert both.pulls == report.Pulls(succeeded=8, failed={"Timeout": 2}, bytes=20, retried=2)
    assert both.rss == report.Use(most=170, growth=70, grown="r1.1")
    assert both.processes == 6
    assert both.verbs == 10
    assert both.leaked == ["r9.1", "r9.1"]
    assert [breach.seed for breach in both.violations] == [1, 2]


def test_a_kind_that_held_nobody_up_in_one_run_keeps_the_stall_of_the_other() -> None:
    with_stall, without = one(1, stall=2.0, growth=0), one(2, stall=3.0, growth=0)
    without.faults["stop"].stall = None
    for runs in ([with_stall, without], [without, with_stall]):
        stop = report.combine(runs).faults["stop"]
        assert (stop.count, stop.stall) == (2, with_stall.faults["stop"].stall)


def test_combining_changes_no_summary() -> None:
    first, second = one(1, stall=2.0, growth=70), one(2, stall=3.0, growth=20)
    before = msgspec.json.encode(first)
    report.combine([first, second])
    assert msgspec.json.encode(first) == before


def test_no_run_combines_to_an_empty_summary() -> None:
    assert report.combine([]) == report.Summary()


# --- what is read ---


def shown(summary: report.Summary) -> str:
    console = Console(file=io.StringIO(), width=160)
    report.show(summary, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_name_faults_stalls_seeds_and_violations() -> None:
    text = shown(report.combine([one(41, stall=2.0, growth=70), one(42, stall=3.0, growth=20)]))
    assert re.search(r"stop .* 2 .* 3\.00 s .* r1\.1 at 10\.5 s \(seed 42\)", text)
    assert "2 Timeout" in text
    assert "seeds 41, 42" in text
    assert "G1 (right_bytes) seed 41, 51.000 s, r1.1: wrong" in text
    assert "no violation" not in text


def test_what_several_reports_come_to_together_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=160)
    report.show_in_all(report.combine([one(1, 2.0, 70), one(2, 3.0, 20)]), console)
    assert isinstance(console.file, io.StringIO)
    assert "2 faults, 8 pulls" in console.file.getvalue()
    assert "2 violations, 0 hangs, 2 processes leaked" in console.file.getvalue()


def test_a_run_without_violations_says_so() -> None:
    assert "no violation" in shown(report.summarise(USUAL, [], seed=1, leaked=[]))


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    broken = [Violation("G1", "x", 1.0, "r1.1", "tensors [bold]w[/bold] and [/]")]
    text = shown(report.summarise(USUAL, broken, seed=1, leaked=[]))
    assert "tensors [bold]w[/bold] and [/]" in text


def test_the_json_file_reads_back_as_the_same_summary(tmp_path: Path) -> None:
    summary = one(1, stall=2.0, growth=70)
    report.write_json(summary, tmp_path / "summary.json")
    read = msgspec.json.decode((tmp_path / "summary.json").read_bytes(), type=report.Summary)
    assert read == summary


# --- the page ---


def test_the_page_says_what_was_saved(tmp_path: Path) -> None:
    die, stop = one(1, stall=0.4, growth=0), one(1, stall=2.5, growth=0)
    die.faults = {"kill a source": die.faults["stop"]}
    stop.faults = {"stop a source": stop.faults["stop"]}
    rounds = one(7, stall=9.0, growth=0)
    named = {"each-kind": one(1, stall=2.0, growth=0), "sources-die": die, "sources-stop": stop}
    total = report.combine([rounds, *named.values()])
    figures.save(figures.whole(rounds, named, total), tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{figures.OPENING}old\n{figures.CLOSING}\nafter\n")
    for _ in range(2):  # filling it again changes nothing
        figures.fill(figures.read(tmp_path), page)
        said = page.read_text()
        assert "old" not in said
        assert said.startswith("before\n")
        assert said.endswith("\nafter\n")
        assert "4 faults, 16 pulls" in said
        assert "4 violations" in said
        assert "| sources-die | 1 | 0.40 | 0.5 |" in said
        assert "| sources-stop | 1 | 2.50 | 3.0 |" in said
        assert "| stop | 2.00 | 9.00 | 1 | 1 |" in said


def test_a_page_without_a_place_for_figures_stays_as_it_is(tmp_path: Path) -> None:
    each = one(1, stall=1.0, growth=0)
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(ValueError, match="no place"):
        figures.fill(figures.whole(each, {}, each), page)
    assert page.read_text() == "nothing here"


# --- the timeline ---


def drawn(tmp_path: Path, events: list[AnyEvent], *violations: Violation) -> str:
    path = tmp_path / "timeline.html"
    timeline.write_timeline(events, violations, path)
    return path.read_text(encoding="utf-8")


def holdings(*parts: Iterable[AnyEvent]) -> list[tuple[int, float, float]]:
    events = told(worker("r1.1"), *parts, phase("over", 100.0))
    found = history(events)
    return list(timeline.held(found.lives["r1.1"], found.last))


def test_a_version_is_held_until_the_next_verb_that_moves_the_tensors() -> None:
    found = holdings(
        verb("r1.1", "publish", 1, 1, "4"),
        verb("r1.1", "versions", 3, 1),
        verb("r1.1", "unpublish", 5, 1),
        pull("r1.1", 7, 1, version=9),
        pull("r1.1", 10, 2, version=10),
    )
    assert found == [(4, 2, 5), (9, 8, 10), (10, 12, 100)]


def test_a_version_is_held_again_if_taking_it_back_failed_and_left_it_published() -> None:
    publish = verb("r1.1", "publish", 1, 1, "4")
    kept = verb("r1.1", "unpublish", 5, 1, error="Timeout", state="PUBLISHED")
    torn = pull("r1.1", 8, 1, error="TransferError", state="TORN")
    assert holdings(publish, kept, torn) == [(4, 2, 5), (4, 6, 8)]


def test_nothing_is_held_after_the_process_is_gone() -> None:
    found = holdings(verb("r1.1", "publish", 1, 1, "4"), exited("r1.1", 30))
    assert found == [(4, 2, 30)]


def test_each_worker_has_one_row_for_all_its_lives(tmp_path: Path) -> None:
    page = drawn(
        tmp_path,
        told(worker("r10.1"), worker("r2.1", at=1.0), exited("r2.1", 3), worker("r2.2", at=4.0)),
    )
    assert re.findall(r'<div class="name"[^>]*>([^<]*)</div>', page) == ["the run", "r2", "r10"]
    assert page.count('class="life"') == 3
    assert "2 workers, 3 processes, 4.0 s, 0 violations" in page
    assert "no violation" in page


def test_bars_are_where_their_time_is(tmp_path: Path) -> None:
    page = drawn(
        tmp_path,
        told(
            worker("r1.1", at=50.0),
            pull("r1.1", 60, 5, version=1234),
            fault("stop", 70, 20, "r1.1"),
            phase("calm", 125.0),
            phase("over", 150.0),
        ),
    )
    bar = re.search(r'<rect x="15.0%" y="\d+" width="85.0%" height="16" class="held c10"', page)
    assert bar, page
    assert ">1234</text>" in page
    assert '<rect x="20.0%" y="30" width="20.0%" height="30" class="fault"' in page
    assert '<line x1="75.0%" x2="75.0%" y1="0" y2="100%" class="phase"' in page


def test_a_fault_lies_over_the_rows_of_its_targets_or_over_that_of_the_run(tmp_path: Path) -> None:
    rows = told(worker("a.1"), worker("b.1"), worker("c.1"))
    page = drawn(tmp_path, told(rows, fault("cut", 1, 1, "a.1", "c.1"), fault("all", 3, 1)))
    assert re.findall(r'y="(\d+)" width="[^"]*" height="30" class="fault"', page) == [
        "30",
        "90",
        "0",
    ]


def test_failed_verbs_and_violations_are_marked_and_violations_are_listed(tmp_path: Path) -> None:
    broken = Violation("G1", "right_bytes", 6.0, "r1.1", "wrong bytes")
    events = told(worker("r1.1"), pull("r1.1", 1, 2, error="TransferError", message="reset"))
    page = drawn(tmp_path, told(events, phase("over", 8.0)), broken)
    assert re.search(r'class="failed" data-tip="r1.1: replicate latest\nTransferError: reset', page)
    assert re.search(r'<circle id="violation-0" cx="75.0%" cy="38"', page)
    assert '<a href="#violation-0">6.000 s r1.1</a> G1, right_bytes: wrong bytes' in page


def test_all_text_is_escaped(tmp_path: Path) -> None:
    evil = """<script>"bad"</script><!--chart-->&'"""
    broken = Violation(evil, evil, 6.0, evil, evil)
    page = drawn(
        tmp_path,
        told(
            worker(f"{evil}.1", evil, evil),
            pull(f"{evil}.1", 1, 1, evil, error=evil, message=evil),
            fault(evil, 2, 1, f"{evil}.1", detail=evil),
            [Phase(at=3.0, who=RUNNER, phase=evil, detail=evil)],
        ),
        broken,
    )
    assert page.count("<script>") == 1  # the page's own
    assert evil not in page
    assert '"bad"' not in page
    assert (
        page.count("&lt;script&gt;&quot;bad&quot;&lt;/script&gt;&lt;!--chart--&gt;&amp;&#x27;") > 9
    )


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = drawn(tmp_path, USUAL)
    assert not re.search(r"src=|https?:|url\(|@import|<link", page)
    assert not re.search(r"<!--\w+-->", page)  # every place was filled


def test_nothing_can_not_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no event"):
        drawn(tmp_path, [])
