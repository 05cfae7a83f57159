"""What holds for all tests."""

from __future__ import annotations

from contextlib import suppress

# A busy machine takes its time over an example; nothing is wrong with it then.
with suppress(ModuleNotFoundError):  # where only transports are tried, it may not be there
    from hypothesis import settings

    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")
