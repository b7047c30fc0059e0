"""Snapshots, images, and the parts of the local provider that are plain functions."""

from __future__ import annotations

import io
import json
import os
import stat
import struct
import sys
import tarfile
from pathlib import Path

import pytest

from lowtide.errors import MissingDependencyError, SandboxNotFoundError, ValidationError
from lowtide.providers.base import Limits
from lowtide.providers.images.store import ImageStore
from lowtide.providers.local import LocalProvider, bwrap, cgroups, doctor, first, seccomp
from lowtide.trees.copy import copy_tree

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import read, run, shell, spec


async def test_a_snapshot_carries_changes_and_deletions(provider: LocalProvider) -> None:
    first = await provider.create(spec())
    script = (
        "echo hi >/root/f; ln /root/f /root/g; ln -s f /root/l; rm /etc/hosts /usr/bin/env; rm -r /home/user; "
        "mkdir /home/user; echo x >/usr/local/bin/tool; truncate -s 50M /root/sparse; chmod 640 /root/f"
    )
    assert (await shell(provider, first.sandbox_id, script))[0] == 0
    taken = await provider.snapshot(first.sandbox_id, "my snapshot!")
    assert taken in await provider.list_snapshots()
    assert (await run(provider, first.sandbox_id, "true"))[0] == 0
    assert os.stat(provider.home / "snapshots" / taken / "root/root/sparse").st_blocks < 1000
    second = await provider.create(spec(snapshot=taken))
    look = "cat /root/l; stat -c '%h %a' /root/f; ls -A /home/user; cat /usr/local/bin/tool; ls /etc/hosts /usr/bin/env"
    _code, out, err = await shell(provider, second.sandbox_id, look)
    assert out == "hi\n2 640\nx\n"
    assert "/etc/hosts" in err
    assert "/usr/bin/env" in err
    await shell(provider, second.sandbox_id, "echo more >/root/h")
    assert await provider.destroy(first.sandbox_id) is True
    third = await provider.snapshot_and_destroy(second.sandbox_id, "chain")
    with pytest.raises(SandboxNotFoundError):
        await provider.get(second.sandbox_id)
    fourth = await provider.create(spec(snapshot=third))
    assert (await shell(provider, fourth.sandbox_id, "cat /root/f /root/h"))[1] == "hi\nmore\n"
    with pytest.raises(ValidationError, match="in use"):
        await provider.delete_snapshot(taken)
    await provider.destroy(fourth.sandbox_id)
    assert await provider.delete_snapshot(third) is True
    assert await provider.delete_snapshot(taken) is True
    assert await provider.delete_snapshot(taken) is False
    with pytest.raises(SandboxNotFoundError):
        await provider.create(spec(snapshot=taken))


def test_copying_a_layer_follows_no_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("outside")
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "dir").symlink_to(secret)
    (layer / "file").symlink_to(secret / "file")
    os.mkfifo(layer / "fifo")
    (layer / "closed").mkdir()
    copy_tree(str(layer), str(tmp_path / "copy"))
    assert os.readlink(tmp_path / "copy/dir") == str(secret)
    assert (tmp_path / "copy/file").is_symlink()
    assert stat.S_ISFIFO((tmp_path / "copy/fifo").lstat().st_mode)


def _tar(*members: tuple[str, bytes | None, dict[str, object]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data, details in members:
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            for key, value in details.items():
                setattr(member, key, value)
            if data is not None:
                member.size = len(data)
            archive.addfile(member, io.BytesIO(data) if data is not None else None)
    return packed.getvalue()


def _directory(name: str) -> tuple[str, None, dict[str, object]]:
    return name, None, {"type": tarfile.DIRTYPE}


def _docker_save(tmp_path: Path, layers: list[bytes], config: dict[str, object]) -> Path:
    files: list[tuple[str, bytes | None, dict[str, object]]] = [
        (f"{number}/layer.tar", data, {}) for number, data in enumerate(layers)
    ]
    names = [name for name, _, _ in files]
    files.append(("config.json", json.dumps({"config": config}).encode(), {}))
    files.append(("manifest.json", json.dumps([{"Config": "config.json", "Layers": names}]).encode(), {}))
    path = tmp_path / "image.tar"
    path.write_bytes(_tar(*files))
    return path


def _busybox_layer() -> bytes:
    """A root filesystem of one static program: ours."""
    program = first.program()
    assert program is not None
    members = [_directory(name) for name in ("bin", "etc", "tmp", "old")]
    return _tar(*members, ("bin/tool", program, {}), ("etc/gone", b"x", {}), ("old/a", b"a", {}))


async def test_an_imported_image_is_what_the_sandbox_runs_on(provider: LocalProvider, tmp_path: Path) -> None:
    upper = _tar(
        ("etc/.wh.gone", b"", {}),
        ("old/.wh..wh..opq", b"", {}),
        ("old/b", b"b", {}),
        ("etc/new", b"new", {"uid": 5}),
    )
    file = _docker_save(tmp_path, [_busybox_layer(), upper], {"Env": ["FROM=image"], "WorkingDir": "/work"})
    image = provider.images.import_file("team/app:1", file)
    assert len(image.layers) == 2
    assert [i.name for i in provider.images.images()] == ["team/app:1"]
    made = await provider.create(spec(image="team/app:1"))
    names = {entry.name for entry in await provider.list_dir(made.sandbox_id, "/etc")}
    assert "new" in names
    assert "gone" not in names
    assert [entry.name for entry in await provider.list_dir(made.sandbox_id, "/old")] == ["b"]
    assert await read(provider, made.sandbox_id, "/etc/new") == b"new"
    assert (await provider.stat(made.sandbox_id, "/work")).kind == "directory"
    assert provider._entrance.known(made.sandbox_id).environment["FROM"] == "image"
    with pytest.raises(ValidationError, match="in use"):
        provider.images.remove("team/app:1")
    await provider.destroy(made.sandbox_id)
    assert provider.images.remove("team/app:1") is True
    assert provider.images.remove("team/app:1") is False


async def test_a_root_filesystem_directory_is_not_changed(provider: LocalProvider, tmp_path: Path) -> None:
    rootfs = tmp_path / "rootfs"
    for name in ("etc", "usr", "tmp"):
        (rootfs / name).mkdir(parents=True)
    (rootfs / "etc/motd").write_text("welcome")
    tmp_path.chmod(0o755)
    made = await provider.create(spec(image=str(rootfs)))
    assert await read(provider, made.sandbox_id, "/etc/motd") == b"welcome"
    if os.geteuid() == 0:
        await provider.remove(made.sandbox_id, "/etc/motd", recursive=False)
        assert (rootfs / "etc/motd").read_text() == "welcome"
    with pytest.raises(ValidationError):
        await provider.create(spec(image="/no/such/rootfs"))


@pytest.mark.parametrize(
    "hostile",
    [
        _tar(("../escape", b"x", {})),
        _tar(("a/../../escape", b"x", {})),
        _tar(("link", None, {"type": tarfile.LNKTYPE, "linkname": "../../../etc/passwd"})),
    ],
)
def test_a_layer_cannot_leave_its_directory(tmp_path: Path, hostile: bytes) -> None:
    store = ImageStore(tmp_path / "local/images", None)
    with pytest.raises(ValidationError):
        store.add("bad", [io.BytesIO(hostile)], {})
    assert not (tmp_path / "escape").exists()
    assert not (tmp_path / "local/escape").exists()
    assert os.listdir(tmp_path / "local/images") == []


def test_links_in_a_layer_lead_inside_the_layer(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    layer = _tar(
        ("abs", None, {"type": tarfile.SYMTYPE, "linkname": str(outside)}),
        ("abs/file", b"x", {}),
        ("up", None, {"type": tarfile.SYMTYPE, "linkname": "../../../../../../" + str(outside)}),
        _directory("real"),
        ("in", None, {"type": tarfile.SYMTYPE, "linkname": "real"}),
        ("in/file", b"y", {}),
    )
    store = ImageStore(tmp_path / "local/images", None)
    try:
        store.add("links", [io.BytesIO(layer)], {})
        assert (tmp_path / "local/images/links/0/real/file").read_bytes() == b"y"
    except ValidationError:
        pass
    assert list(outside.iterdir()) == []


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "local/images", None)
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "missing"):
        with pytest.raises(ValidationError):
            store.import_file("x", path)


def test_cgroup_v2_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controllers of this machine may all be bound to version 1: the writes go to a stand-in directory."""
    parent = tmp_path / "user.slice"
    parent.mkdir()
    monkeypatch.setattr(
        cgroups, "hierarchy", lambda controller: cgroups.Hierarchy(version=2, parent=parent, own=parent)
    )
    groups = cgroups.plan("abc", Limits(memory_bytes=1 << 20, cpu=1.5, pids=7), below={})
    assert [group.path for group in groups] == [parent / "lowtide-abc"]
    (parent / "lowtide-abc").mkdir()
    (parent / "lowtide-abc/memory.swap.max").write_text("max")
    cgroups.make(groups)
    written = {file.name: file.read_text() for file in (parent / "lowtide-abc").iterdir()}
    assert written == {
        "memory.max": "1048576",
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
        "pids.max": "7",
    }
    (parent / "lowtide-abc/memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert cgroups.out_of_memory([str(parent / "lowtide-abc")])


def test_a_v2_group_goes_beside_our_own(tmp_path: Path) -> None:
    scope = tmp_path / "user.slice/run.scope"
    scope.mkdir(parents=True)
    (tmp_path / "user.slice/cgroup.subtree_control").write_text("memory pids")
    (tmp_path / "user.slice/cgroup.controllers").write_text("memory pids")
    found = cgroups._unified(tmp_path, "/user.slice/run.scope", "/", "memory")
    assert found == cgroups.Hierarchy(version=2, parent=tmp_path / "user.slice", own=scope)
    assert isinstance(cgroups._unified(tmp_path, "/user.slice/run.scope", "/", "cpu"), str)


def test_the_filter_is_well_formed_on_every_machine() -> None:
    for machine in ("x86_64", "aarch64"):
        code = list(struct.iter_unpack("HBBI", seccomp.filter_bytes(machine)))
        assert len(code) < 4096
        for at, (kind, then, otherwise, _) in enumerate(code):
            if kind & 0x07 == 0x05:
                assert at + 1 + max(then, otherwise) < len(code)
        assert code[-1][0] == 0x06


def test_bwrap_is_found_or_said_how_to_get(tmp_path: Path) -> None:
    assert bwrap.find({}).version >= bwrap.OLDEST
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
    old.chmod(0o755)
    with pytest.raises(MissingDependencyError, match=r"0\.8\.0"):
        bwrap.find({"LOWTIDE_BWRAP": str(old)})


def test_the_doctor_has_a_fix_for_everything_that_is_missing() -> None:
    checks = doctor.doctor()
    assert {"bwrap", "user namespaces", "overlay", "memory limit"} <= {check.name for check in checks}
    assert all(check.ok or check.fix for check in checks)
    assert "sysctl" in doctor.advice(
        "bwrap: setting up uid map: Permission denied"
    ) or "container" in doctor.advice("bwrap: setting up uid map: Permission denied")
