"""What a sandbox sees of the Python that runs lowtide: which directories, and what is hidden in them."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from lowtide.providers.local import LocalProvider, doctor, python_trees

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, spec

LIBRARY = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment with things of its owner in it."""
    prefix = tmp_path / "venv"
    for name in ("bin", f"{LIBRARY}/site-packages/package", "secrets"):
        (prefix / name).mkdir(parents=True)
    for name in ("bin/key", f"{LIBRARY}/site-packages/key", "key"):
        (prefix / name).touch(0o600)
    (prefix / f"{LIBRARY}/site-packages/package/module.py").touch(0o644)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "base_prefix", str(prefix))
    return prefix


def test_only_programs_and_library_are_shown(prefix: Path) -> None:
    assert python_trees.trees() == (f"{prefix}/bin", f"{prefix}/lib")


def test_what_only_its_owner_may_enter_is_not_shown_and_the_doctor_says_so(prefix: Path) -> None:
    (prefix / "lib").chmod(0o700)
    assert python_trees.trees() == (f"{prefix}/bin",)
    check = next(check for check in doctor.doctor() if check.name == "python")
    assert not check.ok
    assert str(prefix) in (check.fix or "")


def test_an_ordinary_users_private_files_are_hidden_by_a_layer(prefix: Path, tmp_path: Path) -> None:
    masks = python_trees.Masks(tmp_path / "masks", None)
    programs, library = masks.masked()
    assert [path.name for path in Path(programs.mask).iterdir()] == ["key"]
    hidden = [path for path in Path(library.mask).rglob("*") if not path.is_dir()]
    assert [str(path.relative_to(library.mask)) for path in hidden] == [
        f"python{LIBRARY.rpartition('python')[2]}/site-packages/key"
    ]
    info = hidden[0].lstat()
    assert stat.S_ISCHR(info.st_mode)
    assert info.st_rdev == os.makedev(0, 0)
    assert masks.masked() == (programs, library)  # nothing has changed: nothing is looked at again


def test_a_file_that_comes_later_is_hidden_too(prefix: Path, tmp_path: Path) -> None:
    masks = python_trees.Masks(tmp_path / "masks", None)
    before = masks.masked()
    (prefix / "bin/later").touch(0o600)
    os.utime(prefix / "bin", ns=(0, 1))  # a clock too coarse for two changes at once is no reason to see it
    after = masks.masked()
    assert after != before
    assert {path.name for path in Path(after[0].mask).iterdir()} == {"key", "later"}


def test_as_root_nothing_has_to_be_hidden(prefix: Path, tmp_path: Path) -> None:
    for tree in python_trees.Masks(tmp_path / "masks", 1000).masked():
        assert list(Path(tree.mask).iterdir()) == []


@pytest.mark.skipif(not pytest.__file__.startswith(sys.prefix), reason="packages are elsewhere")
async def test_packages_can_be_imported_inside(provider: LocalProvider) -> None:
    made = await provider.create(spec())
    code = "import pytest, sys; print(pytest.__file__, sys.prefix)"
    said = (await run(provider, made.sandbox_id, "python3", "-c", code))[1]
    assert (
        said == f"{pytest.__file__} /opt/python\n"
    )  # the visible packages, under an environment that is writable
