"""Attempts through what a sandbox is made from: arguments, working directories, links where mounts go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from lowtide import Sandbox
from lowtide.errors import LowtideError
from lowtide.providers.base import STDOUT, Labels, ProcessSpec, SandboxSpec
from lowtide.providers.local import LocalProvider
from tests.escape.attempt import ANSWER_SECONDS, Target, attempt

INJECTED = "x\0--ro-bind\0/etc\0/hostroot"


async def _seen_with(spec: SandboxSpec, argv: tuple[str, ...]) -> str:
    """What a command prints in a sandbox made at the seam, past the checks of the public surface."""
    provider = LocalProvider.connect(os.environ)
    try:
        with contextlib.suppress(LowtideError, ValueError):
            made = await provider.create(spec)
            process = await provider.start_process(made.sandbox_id, ProcessSpec(argv=argv))
            said = b""
            async for stream, data in process.output():
                said += data if stream == STDOUT else b""
            await process.aclose()
            return said.decode(errors="replace")
        return ""
    finally:
        await provider.destroy(spec.lease_id)
        await provider.aclose()


def _spec(**details: object) -> SandboxSpec:
    labels = Labels(lease_id="t" + secrets.token_hex(10), ledger_id="escape", owner="escape")
    return SandboxSpec(labels=labels, **details)  # type: ignore[arg-type]


def _injected(**details: object) -> str | None:
    said = asyncio.run(_seen_with(_spec(**details), ("sh", "-c", "ls -d /hostroot/* 2>/dev/null")))
    return "the root of this machine is mounted inside" if said.strip() else None


@attempt("add arguments to bubblewrap with a NUL in an environment value")
def nul_in_environment(target: Target) -> str | None:
    return _injected(environment={"NAME": INJECTED})


@attempt("add arguments to bubblewrap with a NUL in an environment name")
def nul_in_environment_name(target: Target) -> str | None:
    return _injected(environment={f"NAME\0value\0{INJECTED[2:]}\0--setenv\0A": "b"})


@attempt("add arguments to bubblewrap with a NUL in the working directory")
def nul_in_working_directory(target: Target) -> str | None:
    return _injected(working_dir=f"/{INJECTED[1:]}")


@attempt("make a directory on this machine: the working directory is behind a link of a root filesystem")
def working_directory_behind_a_link(target: Target) -> str | None:
    outside = target.directory()
    outside.chmod(0o777)
    tree = _root_filesystem(target)
    (tree / "way").symlink_to(f"/oldroot{outside}")
    (tree / "plain").symlink_to(outside)
    for folder in ("/way/made", "/plain/made"):
        box = None
        with contextlib.suppress(LowtideError):
            box = target.make(container_image=str(tree), working_dir=folder)
            box.exec(["/bin/true"]).exception(ANSWER_SECONDS)
        if box is not None:
            box.stop().exception(ANSWER_SECONDS)
    return f"made {os.listdir(outside)}" if os.listdir(outside) else None


@attempt("make a directory on this machine: the working directory is behind a link in a snapshot")
def working_directory_in_a_snapshot(target: Target) -> str | None:
    outside = target.directory()
    outside.chmod(0o777)
    with target.make() as box:
        box.exec(["ln", "-s", f"/oldroot{outside}", "/way"], check=True).result(ANSWER_SECONDS)
        name = box.snapshot().result(ANSWER_SECONDS)
    try:
        with contextlib.suppress(LowtideError), target.make(snapshot=name, working_dir="/way/made") as box:
            box.exec(["true"]).exception(ANSWER_SECONDS)
    finally:
        _forget(name)
    return f"made {os.listdir(outside)}" if os.listdir(outside) else None


@attempt("make a directory on this machine: links where /proc, /dev and /usr are mounted")
def mount_points_behind_links(target: Target) -> str | None:
    outside = target.directory()
    outside.chmod(0o777)
    for name in ("proc", "dev"):
        tree = _root_filesystem(target)
        (tree / name).rmdir()
        (tree / name).symlink_to(f"/oldroot{outside}/{name}")
        with contextlib.suppress(LowtideError):
            box = target.make(container_image=str(tree))
            box.exec(["/bin/true"]).exception(ANSWER_SECONDS)
            box.stop().exception(ANSWER_SECONDS)
    return f"made {os.listdir(outside)}" if os.listdir(outside) else None


@attempt("make a directory on this machine: a link in a snapshot above where Python is mounted")
def python_behind_a_link(target: Target) -> str | None:
    import sys

    outside = target.directory()
    outside.chmod(0o777)
    top = "/" + Path(sys.prefix).parts[1]
    if top in ("/usr", "/tmp"):
        # /tmp is the sandbox's own and sticky, but its root's: it can be moved as any other.
        top = str(Path(*Path(sys.prefix).parts[:3]))
    with Sandbox.run(provider="local") as box:  # behind gVisor as well: there it would copy all of Python
        script = f"mv {top} {top}.aside && ln -s /oldroot{outside} {top}"
        box.exec(["/bin/sh", "-c", script]).exception(ANSWER_SECONDS)
        name = box.snapshot().result(ANSWER_SECONDS)
    try:
        with contextlib.suppress(LowtideError), target.make(snapshot=name) as box:
            box.exec(["true"]).exception(ANSWER_SECONDS)
    finally:
        _forget(name)
    return f"made {os.listdir(outside)}" if os.listdir(outside) else None


@attempt("reach a file of this machine by a link to where the old root was")
def old_root(target: Target) -> str | None:
    return (
        target.python("""
for path in ("/oldroot", "/newroot", "/proc/1/root/oldroot", "/.oldroot", "/mnt/home"):
    if tried(os.listdir, path):
        print(path)
""")
        or None
    )


def _root_filesystem(target: Target) -> Path:
    """A directory that can be a sandbox's root: one static program."""
    from lowtide.providers.inside.program import program

    tree = Path(tempfile.mkdtemp(dir=target.directory()))
    tree.chmod(0o755)
    tree.parent.chmod(0o755)
    for name in ("proc", "dev", "bin", "tmp", "etc"):
        (tree / name).mkdir()
    (tree / "bin/true").write_bytes(program(os.uname().machine))
    (tree / "bin/true").chmod(0o755)
    return tree


def _forget(snapshot: str) -> None:
    async def forget() -> None:
        provider = LocalProvider.connect(os.environ)
        await provider.delete_snapshot(snapshot)
        await provider.aclose()

    asyncio.run(forget())
