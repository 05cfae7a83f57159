"""One member of a membership benchmark: says in JSON lines what it comes to hold of others.

    python benchmarks/member.py ours NAME [SEED]
    python benchmarks/member.py kinship NAME [SEED]

Rule of this file. It imports nothing but the membership that it is asked for, so that the
second kind runs in an environment without ours. Lines on stdout: first `{"address": ...}`,
then `{"time": ..., "name": ..., "state": ...}` whenever a member comes or changes, at the time
of `time.time()`, which all processes of a machine share. Lines on stdin: `hold SECONDS` holds
Python's lock for so long; the end of stdin ends it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable


def say(**what: object) -> None:
    """One line, in one piece, from whichever thread."""
    os.write(1, json.dumps(what).encode() + b"\n")


def changed(name: str, state: str) -> None:
    say(time=time.time(), name=name, state=state)


def run_ours(name: str, seeds: list[str]) -> Callable[[], None]:
    import tensorhub_p2p as th
    from tensorhub_p2p.protocol.membership.swim_events import MemberChanged

    peer = th.Peer(cluster="benchmark", seeds=seeds, name=name, transports=["tcp"])
    driver = peer._driver  # a look inside: there is no public stream of membership events

    def tap(_now: float) -> None:
        pass_on = driver.control._on_event

        def on_event(event: object) -> None:
            if isinstance(event, MemberChanged):
                changed(event.member.info.name, event.member.status.name.lower())
            pass_on(event)

        driver.control._on_event = on_event
        for member in driver.node.zones.members():
            changed(member.info.name, member.status.name.lower())

    driver.ask(tap)
    say(address=peer.address)
    return peer.close


def run_kinship(name: str, seeds: list[str]) -> Callable[[], None]:
    import threading

    import kinship
    from kinship.blocking import Cluster

    config = kinship.Config.lan(
        name=name, bind="127.0.0.1:0", seeds=seeds, insecure_plaintext=True, probe_interval=1.0
    )
    cluster = Cluster(config).start()
    events = cluster.events()
    states = {
        kinship.MemberJoined: "alive",
        kinship.MemberRecovered: "alive",
        kinship.MemberSuspect: "suspect",
        kinship.MemberDead: "dead",
        kinship.MemberLeft: "left",
    }

    def listen() -> None:
        for event in events:
            state = states.get(type(event))
            if state is not None:
                changed(event.member.name, state)

    for member in cluster.members():
        changed(member.name, member.state.name.lower())
    threading.Thread(target=listen, daemon=True).start()
    say(address=cluster.local.addr)
    return cluster.close


def main() -> None:
    kind, name, *seeds = sys.argv[1:]
    close = {"ours": run_ours, "kinship": run_kinship}[kind](name, seeds)
    for line in sys.stdin:
        command, seconds = line.split()
        assert command == "hold"
        say(holding=True)
        ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))  # PyDLL keeps the lock
        say(holding=False)
    close()


if __name__ == "__main__":
    main()
