"""What holds for all tests."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tensorhub_p2p.transfer import native_loops

# A busy machine takes its time over an example; nothing is wrong with it then.
with suppress(ModuleNotFoundError):  # where only transports are tried, it may not be there
    from hypothesis import settings

    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")


@pytest.fixture(params=["native loops", "loops in Python"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads in both ways, whatever this machine has."""
    if request.param == "loops in Python":
        monkeypatch.setattr(native_loops, "_loops", None)
    elif native_loops.why_not:
        pytest.skip(f"no native loops: {native_loops.why_not}")
