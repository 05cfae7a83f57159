"""How fast real processes notice a death or a stall, beside kinship in the same run.

    python benchmarks/membership_processes.py                 32 peers a side, about ten minutes
    python benchmarks/membership_processes.py --peers 8 --rounds 3

kinship (SWIM and Lifeguard for Python, on PyPI) gets an environment of its own in the user's
cache directory. Both sides run at the same time with the same probe interval, 1 s, each
with its defaults otherwise, and are measured in turns, so that whatever slows the machine
slows both. Who was killed is replaced.

    kill    kill -9 until every other member holds it for dead
    stop    SIGSTOP until every other member knows that it is silent: ours unresponsive or dead
            (a mere suspicion does not count), kinship suspect or dead
    pauses  SIGSTOP, and SIGCONT after 0.5 to 3 s: does anybody hold anybody for dead?
    stalls  Python's lock held for 10 s: the same, and whom the stalled one declares dead

Results are saved in benchmarks/results/membership_processes.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine

KINSHIP = "kinship==0.4.0"
PROGRAM = Path(__file__).with_name("member.py")
PATIENCE = 90.0
PAUSES = (0.5, 1.0, 2.0, 3.0)
AFTERMATH = 8.0
"""Seconds after a pause or stall in which a wrong verdict may still come."""
KNOWN_SILENT = {"ours": {"unresponsive", "dead"}, "kinship": {"suspect", "dead"}}


class Member:
    """One process, and what it holds of the others."""

    def __init__(self, side: Side, name: str, seeds: list[str]) -> None:
        self.name = name
        self.address = ""
        self.holding = False
        self.failed = False
        """It ended by itself; its reason is on stderr."""
        self._killed = False
        self.states: dict[str, str] = {}
        self.history: list[tuple[float, str, str]] = []
        self._changed = side.changed
        self._process = subprocess.Popen(
            [side.python, str(PROGRAM), side.kind, name, *seeds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=side.environment,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._changed:
                self.address = said.get("address", self.address)
                self.holding = said.get("holding", self.holding)
                if "name" in said:
                    self.states[said["name"]] = said["state"]
                    self.history.append((said["time"], said["name"], said["state"]))
                self._changed.notify_all()
        with self._changed:
            self.failed = not self._killed
            self._changed.notify_all()

    def signal(self, number: int) -> float:
        """Returns when."""
        self._killed = self._killed or number == signal.SIGKILL
        now = time.time()
        self._process.send_signal(number)
        return now

    def hold(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"hold {seconds}\n".encode())
        self._process.stdin.flush()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


class Side:
    """All members of one kind."""

    def __init__(self, kind: str, python: str, peers: int) -> None:
        self.kind, self.python = kind, python
        self.changed = threading.Condition()
        self.environment = dict(os.environ)
        self.members: list[Member] = []
        self.started: list[Member] = []
        self._names = iter(range(10**6))
        try:
            self._start_all(peers)
        except BaseException:
            self.end()
            raise

    def _start_all(self, peers: int) -> None:
        while len(self.members) < peers:
            seeds = [member.address for member in self.members[:1]]
            count = min(4, peers - len(self.members)) if seeds else 1
            self.members += [self._start(seeds) for _ in range(count)]
            self.wait(lambda: all(member.address for member in self.members))
        self.settle()

    def _start(self, seeds: list[str]) -> Member:
        self.started.append(Member(self, f"{self.kind}-{next(self._names)}", seeds))
        return self.started[-1]

    def wait(self, true: Callable[[], bool]) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self._failed() or true(), PATIENCE)
            if self._failed() or not true():
                why = "a member ended" if self._failed() else f"waited {PATIENCE:g} s in vain"
                raise RuntimeError(f"{self.kind}: {why}")

    def _failed(self) -> bool:
        return any(member.failed for member in self.started)

    def settle(self) -> None:
        """Until all hold all for alive, and a little longer."""
        names = {member.name for member in self.members}

        def settled() -> bool:
            return all(
                member.states.get(name) == "alive"
                for member in self.members
                for name in names - {member.name}
            )

        self.wait(settled)
        time.sleep(1.0)
        self.wait(settled)

    def choose(self, rng: random.Random) -> Member:
        return rng.choice(self.members)

    def others(self, member: Member) -> list[Member]:
        return [other for other in self.members if other is not member]

    def all_know(self, victim: Member, states: set[str], since: float) -> list[float]:
        """Seconds from `since` until each other member had it in one of these states."""

        def known() -> bool:
            return all(o.states.get(victim.name) in states for o in self.others(victim))

        self.wait(known)
        return [
            min(
                at
                for at, name, state in other.history
                if name == victim.name and state in states and at >= since
            )
            - since
            for other in self.others(victim)
        ]

    def replace(self, victim: Member) -> None:
        self.members.remove(victim)
        victim.kill()
        newcomer = self._start([member.address for member in self.members[:3]])
        self.wait(lambda: newcomer.address != "")
        self.members.append(newcomer)
        self.settle()

    def deaths_since(self, since: float) -> list[tuple[str, str]]:
        """(who, whom) of all deaths of members that are held since then."""
        alive = {member.name for member in self.members}
        return [
            (member.name, name)
            for member in self.members
            for at, name, state in member.history
            if at >= since and state == "dead" and name in alive
        ]

    def end(self) -> None:
        for member in self.started:
            member.kill()


def kill(side: Side, rng: random.Random) -> dict[str, float]:
    victim = side.choose(rng)
    seconds = side.all_know(victim, {"dead"}, victim.signal(signal.SIGKILL))
    side.replace(victim)
    return {"first": min(seconds), "all": max(seconds)}


def stop(side: Side, rng: random.Random) -> dict[str, float]:
    victim = side.choose(rng)
    since = victim.signal(signal.SIGSTOP)
    try:
        seconds = side.all_know(victim, KNOWN_SILENT[side.kind], since)
    finally:
        victim.signal(signal.SIGCONT)
    side.settle()
    return {"first": min(seconds), "all": max(seconds)}


def pause(side: Side, rng: random.Random, seconds: float) -> dict[str, Any]:
    victim = side.choose(rng)
    since = victim.signal(signal.SIGSTOP)
    time.sleep(seconds)
    victim.signal(signal.SIGCONT)
    time.sleep(AFTERMATH)
    side.settle()
    return {"seconds": seconds, "deaths": len(side.deaths_since(since))}


def stall(side: Side, rng: random.Random, seconds: float, at_once: int) -> list[dict[str, Any]]:
    """Some members at once hold their Python's lock."""
    victims = rng.sample(side.members, at_once)
    since = time.time()
    for victim in victims:
        victim.hold(seconds)
    side.wait(lambda: all(victim.holding for victim in victims))
    side.wait(lambda: not any(victim.holding for victim in victims))
    time.sleep(AFTERMATH)
    side.settle()
    deaths = side.deaths_since(since)
    return [
        {
            "declared_dead_by": sum(whom == victim.name for _, whom in deaths),
            "declares_dead": sum(who == victim.name for who, _ in deaths),
            "unresponsive_at": sum(
                any(
                    at >= since and name == victim.name and state == "unresponsive"
                    for at, name, state in other.history
                )
                for other in side.others(victim)
            ),
        }
        for victim in victims
    ]


def kinship_python() -> str:
    """The interpreter of an environment that has kinship, made if there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    where = cache / "tensorhub-p2p-benchmarks" / KINSHIP
    python = where / "bin" / "python"
    if not (where / "ready").exists():
        print(f"installing {KINSHIP} into {where}")
        venv.create(where, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", KINSHIP], check=True)
        (where / "ready").touch()
    return str(python)


@contextlib.contextmanager
def sides(peers: int) -> Iterator[list[Side]]:
    started: list[Side] = []
    try:
        for kind, python in (("ours", sys.executable), ("kinship", kinship_python())):
            print(f"starting {peers} peers: {kind}")
            started.append(Side(kind, python, peers))
        yield started
    finally:
        for side in started:
            side.end()


def in_turns(
    both: list[Side], rounds: int, measure: Callable[[Side], dict[str, float]], what: str
) -> dict[str, Any]:
    """Medians of each side, and of the ratios of the rounds."""
    samples: dict[str, list[dict[str, float]]] = {side.kind: [] for side in both}
    for number in range(rounds):
        for side in both if number % 2 else reversed(both):
            samples[side.kind].append(measure(side))
        latest = {kind: round(found[-1]["all"], 2) for kind, found in samples.items()}
        print(f"  {what} {number + 1}/{rounds}: {latest}", flush=True)
    everyone = {kind: [sample["all"] for sample in found] for kind, found in samples.items()}
    return {
        "rounds": rounds,
        "median_all": {kind: statistics.median(found) for kind, found in everyone.items()},
        "worst_all": {kind: max(found) for kind, found in everyone.items()},
        "median_first": {
            kind: statistics.median(sample["first"] for sample in found)
            for kind, found in samples.items()
        },
        "times_faster": machine.median_ratio(everyone["kinship"], everyone["ours"]),
        "samples": everyone,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    results: dict[str, Any] = {}
    with sides(options.peers) as both:
        ours = both[0]
        results["kill"] = in_turns(both, options.rounds, lambda s: kill(s, rng), "kill -9")
        results["stop"] = in_turns(both, options.rounds, lambda s: stop(s, rng), "SIGSTOP")
        results["pauses"] = {
            side.kind: [pause(side, rng, seconds) for seconds in PAUSES] for side in both
        }
        print(f"  pauses: {results['pauses']}", flush=True)
        stalls: list[dict[str, Any]] = []
        while len(stalls) < options.stalls:
            count = min(options.at_once, options.stalls - len(stalls))
            stalls += stall(ours, rng, 10.0, count)
            print(f"  stalls: {stalls[-count:]}", flush=True)
        results["stalls"] = stalls
    return results


def table(results: dict[str, Any], peers: int) -> str:
    lines = [f"{'':<26}{'ours':>9}{'kinship':>9}{'faster':>9}   {peers} peers, median seconds"]
    for key, what in (("kill", "kill -9 noticed by all"), ("stop", "SIGSTOP noticed by all")):
        case = results[key]
        median = case["median_all"]
        lines.append(
            f"{what:<26}{median['ours']:>9.2f}{median['kinship']:>9.2f}"
            f"{case['times_faster']:>8.1f}x   worst {case['worst_all']['ours']:.2f}"
            f" / {case['worst_all']['kinship']:.2f}"
        )
    deaths = {k: sum(p["deaths"] for p in found) for k, found in results["pauses"].items()}
    lines.append(f"{'deaths by pauses <= 3 s':<26}{deaths['ours']:>9}{deaths['kinship']:>9}")
    stalls = results["stalls"]
    died, declared = (sum(s[k] for s in stalls) for k in ("declared_dead_by", "declares_dead"))
    lines.append(
        f"{len(stalls)} stalls of 10 s of Python's lock: "
        f"{died} verdicts on the stalled, {declared} by them"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--stalls", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=4, help="members that stall at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    results = run(options)
    print(table(results, options.peers))
    if not options.no_save:
        case = {"membership_processes": {"peers": options.peers, "against": KINSHIP, **results}}
        path = machine.save("membership_processes", machine.facts(), case)
        print(f"saved in {path}")


if __name__ == "__main__":
    main()
