"""The registry: names, instances, hints, and a child's own connections."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lowtide import MissingDependencyError, ValidationError
from lowtide.providers import registry


def test_the_default_is_the_variable_then_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_PROVIDER", raising=False)
    assert registry.default_name() == ("local" if sys.platform == "linux" else "docker")
    monkeypatch.setenv("LOWTIDE_PROVIDER", "e2b")
    assert registry.default_name() == "e2b"


def test_known_providers_have_a_summary_and_an_install_hint() -> None:
    known = registry.known()
    assert {"local", "docker", "kubernetes", "e2b", "daytona", "runloop"} <= known.keys()
    assert known["local"].install is None
    assert known["e2b"].install == 'pip install "lowtide[e2b]"'
    assert all(entry.summary for entry in known.values())
    assert "faulty" not in known


def test_the_same_options_give_the_same_instance_and_another_environment_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = registry.provider("faulty", directory=str(tmp_path / "a"))
    assert registry.provider("faulty", directory=str(tmp_path / "a")) is one
    assert registry.provider("faulty", directory=str(tmp_path / "b")) is not one
    monkeypatch.setenv("LOWTIDE_FAULTY_DIR", str(tmp_path / "c"))
    third = registry.provider("faulty")
    monkeypatch.setenv("LOWTIDE_FAULTY_DIR", str(tmp_path / "d"))
    assert registry.provider("faulty") is not third


def test_a_forked_child_makes_its_own_instance(tmp_path: Path) -> None:
    mine = registry.provider("faulty", directory=str(tmp_path))
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if registry.provider("faulty", directory=str(tmp_path)) is not mine else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_installed_package_adds_a_provider_but_cannot_replace_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "lowtide_elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowtide-elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lowtide.providers]\nelsewhere = lowtide.testing.faulty:FaultyProvider\nlocal = nowhere:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.known()["elsewhere"].summary == "from lowtide-elsewhere"
    assert registry.known()["local"].module == "lowtide.providers.local"
    assert registry.provider_class("elsewhere").name == "faulty"


def test_a_provider_that_cannot_be_loaded_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "absent", registry.Entry("not_there", "Nothing", "absent", "x"))
    with pytest.raises(MissingDependencyError) as caught:
        registry.provider("absent")
    assert caught.value.install == 'pip install "lowtide[absent]"'


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"known are .*docker.*local"):
        registry.provider("nowhere")


def test_a_provider_whose_packages_are_absent_is_not_installed() -> None:
    there = registry.Entry("m", "C", "x", "s", packages=("json", "click"))
    assert there.installed
    assert not there._replace(packages=("json", "no_such_package")).installed
    for entry in registry.known().values():
        assert bool(entry.packages) == (entry.extra is not None)
