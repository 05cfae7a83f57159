"""A forked child gets an error, never a hang, and never harms its parent's peer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runtime_echo import PATIENCE

HERE = Path(__file__).parent

# In a script of its own: forking the test runner would copy pytest's state too.
PRELUDE = """
import gc, os, sys, threading, weakref
from runtime_echo import EchoPeer
from tensorhub_p2p.errors import PeerClosed
a = EchoPeer().__enter__()
b = EchoPeer().__enter__()
a.reach(b)

def in_child(body):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            {leave}
    assert os.waitpid(pid, 0)[1] == 0
"""


def run(body: str, leave: str = "os._exit(code)") -> str:
    script = PRELUDE.replace("{leave}", leave) + body + "\na.reach(b)\nprint('parent fine')\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("parent fine\n")
    return done.stdout


pytestmark = pytest.mark.processes


def test_a_forked_child_gets_an_error_that_says_what_to_do() -> None:
    said = run("""
def body():
    for use in (a.control.call, a.control.post):
        try:
            use(lambda now: 1)
        except PeerClosed as error:
            print(error)
in_child(body)
""")
    assert said.count("forked child") == 2
    assert "spawn" in said


def test_a_child_forked_while_a_lock_was_held_gets_the_error_too() -> None:
    run("""
def body():
    try:
        a.control.call(lambda now: 1)
    except PeerClosed:
        return
    raise SystemExit("no error")
with a.control._room:
    in_child(body)
""")


def test_stopping_in_the_child_does_nothing_even_if_a_lock_was_held() -> None:
    run("""
def body():
    assert a.control.stop()
    assert not a.control._stopping
with a.control._room:
    in_child(body)
""")


def test_what_the_child_inherited_is_never_destroyed_there() -> None:
    run("""
idle = EchoPeer()  # of a started one the parent's thread holds a reference anyway
def body():
    global idle
    sockets = weakref.ref(idle.links._socket), weakref.ref(idle.links._outgoing._socket)
    del idle
    gc.collect()
    assert None not in [socket() for socket in sockets]
in_child(body)
idle.control.stop()
""")


def test_a_child_that_exits_normally_runs_no_exit_handler_on_the_parents_peer() -> None:
    run("in_child(lambda: None)", leave="sys.exit(code)")


def test_a_forked_child_can_start_a_peer_of_its_own() -> None:
    run("""
def body():
    with EchoPeer() as mine:
        mine.reach(b)
        mine.ping(a.address)
        assert mine.next_ack()[0] == a.me
in_child(body)
""")


def test_the_child_keeps_nothing_open_that_would_hide_the_parents_death() -> None:
    run("""
import socket
port = a.links.bound.port
def bound_here():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            if sock.family == socket.AF_INET and sock.getsockname()[1] == port:
                found.append(name)
    return found
b.watch(a.me)
b.reach(a)
assert len(bound_here()) >= 2, "it listens, and b has connected"
def body():
    assert bound_here() == []
in_child(body)
assert len(bound_here()) >= 2
""")
