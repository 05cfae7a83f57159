"""`tensorhub-p2p simulate membership`: the language of faults, the run, and what is printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from math import inf
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tensorhub_p2p.cli import app, fault_plan
from tensorhub_p2p.sim.faults import Crash, Partition, Pause, Schedule, Stall
from tensorhub_p2p.sim.membership import SEEDS


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", "membership", *arguments])


def outcome(*arguments: str) -> dict[str, Any]:
    result = simulate("--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def planned(text: str, peers: int = 100, duration: float = 60.0, needed: int = 0) -> Schedule:
    plan = fault_plan.parse(text)
    return fault_plan.draw(plan, seed=1, peers=peers, duration=duration, needed=needed)


# -- the language --


def test_every_kind_of_fault_has_its_word() -> None:
    faults = planned("crash=3,host-crash=2,gil=4,pause=5,partition=1").faults
    counts = Counter((type(f), getattr(f, "host", None)) for f in faults)
    assert counts == {
        (Crash, False): 3,
        (Crash, True): 2,
        (Stall, None): 4,
        (Pause, None): 5,
        (Partition, None): 1,
    }


@pytest.mark.parametrize("text", ["none", "", " none ", "crash=0"])
def test_a_plan_may_be_of_nothing(text: str) -> None:
    assert planned(text).faults == ()


def test_a_count_may_be_a_percentage_of_the_peers() -> None:
    assert len(planned("gil=10%", peers=32).faults) == 4
    assert len(planned("pause=1%", peers=32).faults) == 1


def test_crashes_are_for_good_and_stalls_last_five_to_twenty_seconds() -> None:
    for fault in planned("crash=5,host-crash=5,gil=20,pause=20").faults:
        if isinstance(fault, Crash):
            assert fault.lasts == inf
        else:
            assert 5 <= fault.lasts <= 20


def test_seconds_may_be_given_as_one_number_or_a_range() -> None:
    faults = planned("gil=20:3,pause=20:1.5-2,crash=5:4").faults
    assert {f.lasts for f in faults if isinstance(f, Stall)} == {3.0}
    assert {f.lasts for f in faults if isinstance(f, Crash)} == {4.0}
    assert all(1.5 <= f.lasts <= 2 for f in faults if type(f) is Pause)


def test_nobody_suffers_twice_and_the_last_third_is_calm() -> None:
    faults = planned("crash=20,gil=30,pause=30:10,partition=2:20", duration=90).faults
    places = [f.place for f in faults if not isinstance(f, Partition)]  # type: ignore[attr-defined]
    assert len(set(places)) == len(places) == 80
    assert all(f.at >= fault_plan.WARM_UP for f in faults)
    assert all(f.at + (f.lasts if f.lasts < inf else 0) <= 60 for f in faults)


def test_who_newcomers_join_through_is_spared_if_any_are_to_come() -> None:
    needed = 10
    restarts = planned("crash=12:5", peers=24, needed=needed).faults
    assert all(isinstance(f, Crash) and f.place >= needed for f in restarts)
    for_good = planned("crash=22", peers=24, needed=needed).faults
    assert any(isinstance(f, Crash) and f.place < needed for f in for_good)


def test_a_partition_cuts_off_half_of_the_peers() -> None:
    (cut,) = planned("partition=1", peers=31).faults
    assert isinstance(cut, Partition)
    assert len(cut.places) == 15


def test_a_seed_draws_its_schedule_again() -> None:
    assert planned("crash=20,pause=20") == planned("crash=20,pause=20")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("crsh=3", "write one of crash"),
        ("crash", "KIND=COUNT"),
        ("crash=-1", "KIND=COUNT"),
        ("crash=1.5", "whole number"),
        ("pause=5:0", "above 0"),
        ("pause=5:8-3", "rise"),
        ("partition=50%", "number of partitions"),
        ("pause=1:50", "--duration 83 or more"),
        ("crash=100", "more --peers"),
    ],
)
def test_a_plan_that_makes_no_sense_is_answered_with_what_to_write(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        planned(text)


@pytest.mark.parametrize("peers", [2, 3, 4, 10, 20, 100, 1000])
def test_if_nothing_is_said_a_few_crash_and_most_are_left(peers: int) -> None:
    faults = planned(fault_plan.usual(peers), peers=peers).faults
    assert len(faults) == min(10, 2 * (peers // 4))
    assert all(isinstance(fault, Crash) and fault.lasts == inf for fault in faults)


# -- the command --

SMALL = ("--peers", "20", "--duration", "30", "--faults", "crash=2,host-crash=1,gil=1:8,pause=1:8")


def test_a_seed_repeats_a_run_exactly_and_another_one_is_another_run() -> None:
    first = outcome(*SMALL, "--seed", "7")
    assert outcome(*SMALL, "--seed", "7") == first
    assert outcome(*SMALL, "--seed", "8")["trace"] != first["trace"]


def test_a_run_without_a_seed_says_which_one_it_drew() -> None:
    drawn = outcome(*SMALL)
    assert outcome(*SMALL, "--seed", str(drawn["setting"]["seed"])) == drawn


def test_what_happened_is_told_in_one_table() -> None:
    result = simulate(*SMALL, "--seed", "7")
    assert result.exit_code == 0
    for part in ("crashes of a process", "everyone knew after", "wrongly declared dead", "B/s"):
        assert part in result.stdout
    assert "seed 7, trace" in result.stdout
    assert outcome(*SMALL, "--seed", "7")["trace"] in result.stdout


@pytest.mark.parametrize("peers", ["2", "10"])
def test_a_small_cluster_needs_no_faults_to_be_named(peers: str) -> None:
    found = outcome("--peers", peers, "--duration", "20", "--seed", "1")
    assert found["setting"]["faults"] == fault_plan.usual(int(peers))


def test_a_latency_is_what_messages_take_one_way() -> None:
    run = ("--peers", "12", "--seed", "1", "--loss", "0", "--faults", "none")
    near, same, far = (
        outcome(*run, "--latency", latency) for latency in ("0.2-2", "0.2-2", "300-400")
    )
    assert near == same
    assert near["setting"]["latency"] == "0.2-2"
    # There and back takes longer than a direct probe waits: relays are asked, but nobody dies.
    assert "PingRequest" not in near["traffic"]["mean_bytes_by_kind"]
    assert far["traffic"]["mean_bytes_by_kind"]["PingRequest"] > 10
    assert far["false_deaths"] == {}
    assert far["trace"] != outcome(*run, "--latency", "350")["trace"]


def test_without_sockets_crashes_are_noticed_by_silence_alone() -> None:
    run = ("--peers", "20", "--seed", "1", "--faults", "crash=3")
    with_sockets, without = outcome(*run), outcome(*run, "--no-sockets")
    assert with_sockets["setting"]["sockets"] is True
    assert without["setting"]["sockets"] is False
    assert without["process_crashes"]["unnoticed"] == 0
    assert without["process_crashes"]["median"] > 3 * with_sockets["process_crashes"]["median"]
    assert "without sockets" in " ".join(simulate(*run, "--no-sockets").stdout.split())


def test_the_progress_is_on_stderr_and_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "virtual s" not in simulate(*SMALL, "--seed", "7", "--json").stderr
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    result = simulate(*SMALL, "--seed", "7", "--json")
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", result.stderr)
    assert "20 peers, seed 7" in said
    assert "30.0 of 30 virtual s" in said
    assert json.loads(result.stdout)["setting"]["seed"] == 7


def test_the_command_line_is_a_module_as_well() -> None:
    command = [sys.executable, "-m", "tensorhub_p2p.cli", "simulate", "membership", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--faults" in result.stdout
    assert "python -m tensorhub_p2p.cli" in result.stdout


def test_crashes_are_told_apart_and_found_in_the_end() -> None:
    found = outcome("--peers", "30", "--seed", "1", "--faults", "crash=3,host-crash=2")
    process, host = found["process_crashes"], found["host_crashes"]
    assert (process["count"], host["count"]) == (3, 2)
    assert process["unnoticed"] == host["unnoticed"] == 0
    assert process["median"] <= process["p99"] <= process["longest"] < host["median"]
    assert found["views_agree"]
    assert found["agreed_after"] == 0
    assert [f["kind"] for f in found["schedule"]] == ["Crash"] * 5


def test_a_held_lock_kills_nobody_here_and_does_with_memberlist_s_defaults() -> None:
    stalls = ("--peers", "30", "--seed", "2", "--faults", "gil=3:18")
    assert outcome(*stalls)["false_deaths"] == {}
    others = outcome(*stalls, "--preset", "memberlist")
    assert sum(others["false_deaths"].values()) == 3
    assert others["setting"]["sockets"] is False


def test_zones_are_simulated_with_their_gateways() -> None:
    found = outcome("--peers", "24", "--zones", "3", "--duration", "20", "--faults", "crash=3")
    assert found["traffic"]["mean_bytes_by_kind"]["WideArea"] > 0
    assert found["views_agree"]


def test_a_healed_partition_is_one_view_again_and_never_with_memberlist_s_defaults() -> None:
    cut = ("--peers", "12", "--seed", "3", "--duration", "110", "--faults", "partition=1:65")
    found = outcome(*cut)
    assert found["partitions"] == 1
    assert sum(found["false_deaths"].values()) == 12
    assert found["views_agree"]
    others = outcome(*cut, "--preset", "memberlist")
    assert not others["views_agree"]
    assert others["agreed_after"] is None


@pytest.mark.parametrize(
    ("arguments", "option", "advice"),
    [
        (("--loss", "140%"), "--loss", "probability"),
        (("--loss", "much"), "--loss", "0.05 or 5%"),
        (("--latency", "fast"), "--latency", "milliseconds"),
        (("--latency", "9-2"), "--latency", "milliseconds"),
        (("--zones", "60"), "--peers", "at least two"),
        (("--peers", "90000"), "--peers", "--zones 5"),
        (("--duration", "0"), "--duration", "more than 0"),
        (("--duration", "10", "--faults", "pause=1"), "--faults", "--duration 38"),
        (("--faults", "crsh=3"), "--faults", "host-crash"),
        (("--peers", "5", "--faults", "crash=5"), "--faults", "fewer faults"),
    ],
)
def test_a_bad_option_is_an_error_that_says_what_to_do(
    arguments: tuple[str, ...], option: str, advice: str
) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert option in said
    assert advice in said


def test_newcomers_join_where_others_crashed() -> None:
    needed = SEEDS
    found = outcome("--peers", "12", "--seed", "4", "--faults", "crash=4:5")
    assert all(fault["place"] >= needed for fault in found["schedule"])
    assert found["views_agree"]
    assert found["traffic"]["peers"] == 12
