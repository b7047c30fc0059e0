"""What a sandbox sees of the Python that runs lowtide: which directories, and what is hidden in them."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ordinary_user import OrdinaryUser, why_not

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
    assert masks.masked() == (programs, library)  # nothing has changed: the same layers serve again


def test_a_file_that_comes_later_is_hidden_too(prefix: Path, tmp_path: Path) -> None:
    masks = python_trees.Masks(tmp_path / "masks", None)
    before = masks.masked()
    (prefix / "bin/later").touch(0o600)
    after = masks.masked()
    assert after != before
    assert {path.name for path in Path(after[0].mask).iterdir()} == {"key", "later"}


def test_a_file_that_becomes_private_is_hidden_from_the_next_sandbox(prefix: Path, tmp_path: Path) -> None:
    """By its mode alone, or written anew: neither is seen in the times of its directory."""
    (prefix / "bin/token").touch(0o644)
    (prefix / LIBRARY / "site-packages/settings.py").touch(0o644)
    masks = python_trees.Masks(tmp_path / "masks", None)
    times = {path: path.stat() for path in (prefix / "bin", prefix / LIBRARY / "site-packages")}
    before = masks.masked()
    (prefix / "bin/token").chmod(0o600)
    (prefix / LIBRARY / "site-packages/settings.py").chmod(0o600)
    (prefix / "bin/later").touch(0o600)
    for path, info in times.items():
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    programs, library = masks.masked()
    assert {path.name for path in Path(programs.mask).iterdir()} == {"key", "token", "later"}
    hidden = {path.name for path in Path(library.mask).rglob("*") if not path.is_dir()}
    assert hidden == {"key", "settings.py"}
    for name in ("bin/token", "bin/later"):
        (prefix / name).chmod(0o644)
    (prefix / LIBRARY / "site-packages/settings.py").chmod(0o644)
    assert masks.masked() == before  # public again


def test_a_tree_that_becomes_private_or_goes_is_not_shown_to_the_next_sandbox(
    prefix: Path, tmp_path: Path
) -> None:
    masks = python_trees.Masks(tmp_path / "masks", None)
    (prefix / "bin").chmod(0o700)
    assert [tree.path for tree in masks.masked()] == [f"{prefix}/lib"]
    (prefix / "lib").rename(prefix / "elsewhere")
    assert masks.masked() == ()


BESIDE = """
import asyncio, os, sys
from lowtide import Sandbox
site = next(p for p in sys.path if p.startswith(sys.prefix) and p.endswith("site-packages"))
secret, later = os.path.join(site, "beside.txt"), os.path.join(sys.prefix, "bin", "later.txt")
def write(path, mode):
    with open(path, "w", opener=lambda p, flags: os.open(p, flags, mode)) as file:
        file.write("secret")
write(secret, 0o644)
def seen(*paths):
    with Sandbox.run(provider="local") as box:
        return [box.exec(["cat", path]).result(60).stdout for path in paths]
# Often enough for one to be made in advance.
print([seen(secret) for _ in range(3)])
times = [(folder, os.stat(folder).st_mtime_ns) for folder in (site, os.path.dirname(later))]
os.chmod(secret, 0o600)
write(later, 0o600)
for folder, time in times:
    os.utime(folder, ns=(time, time))
print([seen(secret, later) for _ in range(3)])
"""


def test_an_ordinary_users_files_that_become_private_are_not_readable_in_the_next_sandbox() -> None:
    if (missing := why_not()) is not None:
        pytest.skip(missing)
    with OrdinaryUser() as user:
        ran = subprocess.run(
            user.command("-c", BESIDE), capture_output=True, text=True, timeout=120, cwd=user.place
        )
    public, private = (ast.literal_eval(line) for line in ran.stdout.splitlines())
    assert public == [["secret"]] * 3, ran.stderr
    assert private == [["", ""]] * 3


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
