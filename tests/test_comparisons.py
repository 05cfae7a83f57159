"""What the comparisons with other systems rest on: processes told what to do, and ideals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import elastic  # noqa: E402
import environments  # noqa: E402
import remote  # noqa: E402

SCRIPT = """
import sys
from serving import Side, serve

class Source(Side):
    def shout(self, word):
        print("noise on stdout")
        return word.upper()

    def fail(self):
        raise ValueError("as asked")

    def die(self):
        sys.exit("something broke")

serve({"source": Source})
"""


def test_a_perfect_star_serves_one_after_another_at_full_speed() -> None:
    assert elastic.shared_hub([0.0, 10.0], alone=2.0) == [2.0, 2.0]


def test_a_perfect_star_shares_its_cable_evenly_among_those_on_it() -> None:
    assert elastic.shared_hub([0.0, 0.0, 0.0], alone=2.0) == pytest.approx([6.0, 6.0, 6.0])
    # 1 s alone, then both until the first has its second half: 2 s; then 1 s alone.
    assert elastic.shared_hub([0.0, 1.0], alone=2.0) == pytest.approx([3.0, 3.0])


def test_the_process_of_a_system_answers_fails_and_dies_in_words(tmp_path: Path) -> None:
    script = tmp_path / "shouting.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(remote.PEERS)!r})\n{SCRIPT}")
    process = remote.Remote(sys.executable, str(script), "source", {"size": 4096}).started()
    try:
        assert process.shout("a") == "A"
        with pytest.raises(remote.RemoteError, match="ValueError: as asked"):
            process.fail()
        assert process.shout("b") == "B"
        with pytest.raises(remote.RemoteError, match="died: something broke"):
            process.die()
    finally:
        process.end()


def test_a_system_that_can_not_be_imported_says_why() -> None:
    with pytest.raises(environments.Unavailable, match=r"it can't be imported: .*no_such_module"):
        environments._run(
            "it can't be imported", [sys.executable, "-c", "import no_such_module"], 60
        )
