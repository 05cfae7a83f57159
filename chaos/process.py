"""A worker's process, from its settings to its exit code: `python -m chaos.process SETTINGS`.

Exit codes: 0 it was told to end, or had done what it should; 2 it could not go on, by an error that
is one of the library's; 3 whoever started it is gone; 4 any other error; 5 closing failed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from typing import Any

import msgspec

import tensorhub_p2p as th
from chaos import bugs
from chaos.journal import Trouble
from chaos.programs import PROGRAMS
from chaos.worker import CLOSE_SECONDS, Settings, VerbFailed, Worker

PR_SET_PDEATHSIG = 1
LET_GO_SECONDS = 8.0
"""Until what a closed peer had is gone: it doesn't wait for threads that are only connecting, to
a silent peer for the 5 s of a handshake and the 2 s of a first answer."""


def die_with_the_runner() -> None:
    """Also if this process is stopped then: it can't see the end of its stdin."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def sleep_without_the_clock() -> None:
    """libfaketime spoils `time.sleep` where it leaves the monotonic clock alone: EINVAL."""

    def sleep(seconds: Any) -> None:
        select.select([], [], [], seconds)

    time.sleep = sleep


def wait_for_sigterm() -> None:
    """If one came, the peer is being closed by its thread, which ends the process then."""
    for thread in threading.enumerate():
        if thread.name == "tensorhub-sigterm":
            thread.join(CLOSE_SECONDS)
            time.sleep(1.0)  # the signal comes meanwhile


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def left_behind(before: int) -> str:
    """What is still there of a closed peer `LET_GO_SECONDS` later; "" if nothing is."""
    until = time.monotonic() + LET_GO_SECONDS
    while True:
        threads = [t.name for t in threading.enumerate() if t.name.startswith("tensorhub")]
        more = descriptors() - before
        if not threads and more <= 0:
            return ""
        if time.monotonic() > until:
            return f"threads {threads}, {more} descriptors more than before it"
        time.sleep(0.05)


def main() -> None:
    if "FAKETIME_TIMESTAMP_FILE" in os.environ:
        sleep_without_the_clock()
    die_with_the_runner()
    faulthandler.enable()  # who dies of a signal says in its log where it was
    faulthandler.register(signal.SIGUSR1)
    settings = msgspec.json.decode(sys.argv[1].encode(), type=Settings)
    bugs.plant(settings.bug)
    worker = Worker(settings)
    before = descriptors()
    signal.signal(signal.SIGINT, worker.interrupted)
    threading.Thread(target=worker.obey, name="chaos-orders", daemon=True).start()
    code = 0
    try:
        worker.join()
        PROGRAMS[settings.role](worker)
    except VerbFailed as failed:
        code = 0 if worker.stop.is_set() else 2
        if not isinstance(failed.error, th.TensorHubError | KeyboardInterrupt):
            code = 4
    try:
        worker.close()
    except VerbFailed as failed:
        if not isinstance(failed.error, th.RetentionLost):
            code = 5
    wait_for_sigterm()
    stays = left_behind(before)
    if stays:
        worker.write(Trouble, what=f"what outlives the peer: {stays}")
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
