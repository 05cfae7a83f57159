"""What must hold, whatever was done: each check is one promise of docs/guarantees.md.

Rules of this file. A check reads a history and yields violations. Where a guarantee has limits,
the check has the same, and says so: it accuses nobody for what is not promised, and leaves out
what it can't tell. Each is seen to find something (tests/test_chaos_checks.py), and some of them
deliberate bugs in real runs (bugs.py).
"""

from chaos.checks import calm, content, endings, keeping, versions
from chaos.checks.judging import CHECKS, Violation, violations

__all__ = ["CHECKS", "Violation", "calm", "content", "endings", "keeping", "versions", "violations"]
