"""What users get when they install the package."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import tensorhub_p2p
from tensorhub_p2p.transfer.transports import nixl, ucx

PACKAGE = Path(tensorhub_p2p.__file__).parent
ROOT = PACKAGE.parent


def loaded_by(statement: str) -> set[str]:
    """Names of the modules that a new interpreter has after `statement`."""
    script = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50
    )
    return set(result.stdout.split())


def test_importing_the_package_does_not_import_torch() -> None:
    assert "torch" not in loaded_by("import tensorhub_p2p")


def test_the_command_line_starts_without_torch() -> None:
    assert "torch" not in loaded_by("import tensorhub_p2p.cli")


def test_the_protocol_floor_loads_nothing_that_touches_the_world() -> None:
    everything = "\n".join(
        "import " + ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted((PACKAGE / "protocol").rglob("*.py"))
        if path.stem != "__init__"
    )
    # The package's own __init__ brings the upper floors in, so its place is taken by an
    # empty one: what is loaded now was asked for by protocol/ alone.
    stand_in = (
        "import sys, types\n"
        "package = types.ModuleType('tensorhub_p2p')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['tensorhub_p2p'] = package\n"
    )
    loaded = loaded_by(stand_in + everything)
    assert not loaded & {"zmq", "socket", "asyncio", "multiprocessing", "torch", "numpy"}


def test_type_checkers_find_the_marker_in_the_package() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("module", [nixl, ucx])
def test_what_a_transport_says_to_install_is_what_its_extra_brings(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "library", lambda: None)
    if module is nixl:
        extra, transport = "nixl", nixl.NixlTransport()
    else:
        extra, transport = "ucx", ucx.UcxTransport()
    told = transport.unavailable() or ""
    named = re.search(r"pip install ([a-z0-9-]+)$", told)
    assert named is not None, told
    assert re.search(rf'^{extra} = \["{named[1]}>=', (ROOT / "pyproject.toml").read_text(), re.M)


def test_the_command_is_installed_under_its_name() -> None:
    scripts = metadata.entry_points(group="console_scripts")
    found = [s.value for s in scripts if s.name == "tensorhub-p2p"]
    if not found:
        pytest.skip("not installed, only on the path")
    assert found == ["tensorhub_p2p.cli:main"]


@pytest.mark.skipif(not (ROOT / "constraints.txt").exists(), reason="not a checkout")
def test_every_dependency_is_explained_and_pinned() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer reads TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(p for extra in extras.values() for p in extra)]
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    pinned = (ROOT / "constraints.txt").read_text()
    for requirement in wanted:
        name = requirement.partition(">=")[0]
        assert name.removesuffix("-cu12") in explained, name
        if requirement in [*project["dependencies"], *extras["dev"]]:
            assert f"\n{name}==" in pinned, name
