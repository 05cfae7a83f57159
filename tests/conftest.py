"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine takes its time over an example; nothing is wrong with it then.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
