"""The local files of an image reach its build through the real SDK, and nothing else gets into the storage they pass."""

from __future__ import annotations

import http.client
import os
import ssl
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import lowtide.emulators
from lowtide.emulators.daytona import storage
from lowtide.emulators.handle import Handle
from lowtide.testing import emulator
from tests.emulators.conftest import daytona_config

pytest.importorskip("daytona")

CONTEXT = """
import asyncio, os, sys
from pathlib import Path
import daytona
from daytona import AsyncDaytona, CreateSandboxFromImageParams, CreateSnapshotParams, Daytona, Image
here = Path(sys.argv[1]).absolute()
os.chdir(here)
Path("file_example.txt").write_text("one ")
(here / "src" / "deep").mkdir(parents=True)
(here / "src" / "deep" / "two.txt").write_text("two ")
os.symlink("/etc/hostname", here / "src" / "link")
Path("large.bin").write_bytes(os.urandom(6 << 20))
Path("Dockerfile").write_text("FROM x\\nCOPY file_example.txt src /in/\\nRUN cat /in/file_example.txt /in/deep/two.txt > /made\\n")
image = (
    Image.debian_slim("3.12").add_local_file("file_example.txt", "/home/daytona/")
    .add_local_dir(here / "src", "/home/daytona/src").add_local_file("large.bin", "/srv/large.bin")
    .run_commands("cd /home/daytona && cat file_example.txt src/deep/two.txt > /made; wc -c < /srv/large.bin >> /made; readlink src/link >> /made")
)
client = Daytona()
sandbox = client.create(CreateSandboxFromImageParams(image=image))
print(sandbox.process.exec("cat /made").result.split())
client.snapshot.create(CreateSnapshotParams(name="mine", image=Image.from_dockerfile(here / "Dockerfile")))
sandbox = client.create(daytona.CreateSandboxFromSnapshotParams(snapshot="mine"))
print(sandbox.process.exec("cat /made").result.split())

async def go_on():
    async with AsyncDaytona() as client:
        (here / "later.txt").write_text("later")
        more = image.run_commands("groupadd -r daytona && useradd -r -g daytona -m daytona", "mkdir -p /home/daytona/workspace")
        more = more.dockerfile_commands(["USER daytona"]).workdir("/home/daytona/workspace").add_local_file("later.txt", "/home/daytona/workspace/later.txt")
        sandbox = await client.create(CreateSandboxFromImageParams(image=more))
        print((await sandbox.process.exec("cat /made later.txt")).result.split())
        print(await sandbox.fs.download_file("later.txt"), await sandbox.get_work_dir(), await sandbox.get_user_home_dir())

asyncio.run(go_on())
print(os.environ.get("THEIR_OWN"), "SSL_CERT_DIR" in os.environ)
"""


def test_local_files_of_an_image_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, theirs = tmp_path / "files", tmp_path / "theirs"
    files.mkdir()
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import os; os.environ['THEIR_OWN'] = 'ran'\n")
    monkeypatch.setenv("PYTHONPATH", str(theirs))
    with lowtide.emulators.start("daytona", home=tmp_path / "home") as handle:
        done = subprocess.run(
            [sys.executable, "-c", CONTEXT, str(files)],
            env={**os.environ, **handle.environment},
            capture_output=True,
            text=True,
            timeout=200,
        )
    made = ["one", "two", str(6 << 20), "/etc/hostname"]
    printed = [str(made), str(["one", "two"]), str([*made, "later"])]
    printed += ["b'later' /home/daytona/workspace /home/daytona", "ran False"]
    assert [line for line in done.stdout.splitlines() if line in printed] == printed, (
        done.stdout + done.stderr
    )


def test_local_files_in_the_process_that_holds_the_emulator(tmp_path: Path) -> None:
    sdk: Any = pytest.importorskip("daytona")
    (tmp_path / "a.txt").write_text("given")
    before = dict(os.environ)
    with emulator("daytona", home=tmp_path / "home", set_environment=True):
        image = sdk.Image.base("x").add_local_file(str(tmp_path / "a.txt"), "/a.txt")
        sandbox = sdk.Daytona().create(sdk.CreateSandboxFromImageParams(image=image), timeout=0)
        assert sandbox.process.exec("cat /a.txt").result == "given"
    assert dict(os.environ) == before


def test_without_certificates_local_files_are_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    sdk: Any = pytest.importorskip("daytona")
    with emulator("daytona", plain=True, home=tmp_path) as handle:
        image = sdk.Image.base("python:3.12").add_local_file(__file__, "/x")
        client = sdk.Daytona(daytona_config(handle))
        with pytest.raises(sdk.DaytonaError, match=r"not available with --plain.*upload_file"):
            client.create(sdk.CreateSandboxFromImageParams(image=image), timeout=0)


def asked(handle: Handle, method: str, url: str, **headers: str) -> tuple[int, str]:
    parts = urlsplit(url)
    context = ssl.create_default_context(cafile=handle.certificate)
    connection = http.client.HTTPSConnection(str(parts.hostname), parts.port, context=context, timeout=30)
    try:
        connection.request(method, f"{parts.path}?{parts.query}".rstrip("?"), body=b"x", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_nothing_is_taken_from_who_has_not_signed_it(daytona: Handle, daytona_client: Any) -> None:
    obstore: Any = pytest.importorskip("obstore")
    from obstore.store import S3Store

    access = daytona_client._object_storage_api.get_push_access()
    place = f"{access.organization_id}/{'0' * 32}/context.tar"

    def store(**other: Any) -> Any:
        given = {
            "access_key_id": access.access_key,
            "secret_access_key": access.secret,
            "session_token": access.session_token,
            "region": access.region,
            **other,
        }
        roots = Path(daytona.certificate).read_text()
        return S3Store(
            bucket=access.bucket,
            endpoint=access.storage_url,
            client_options={"root_certificate": roots, "timeout": timedelta(seconds=30)},
            retry_config={"max_retries": 0},
            **given,
        )

    good = store()
    for wrong in (
        {"secret_access_key": "0" * 40},
        {"session_token": "0" * 64},
        {"access_key_id": "0" * 20},
        {"region": "eu-west-1"},
    ):
        with pytest.raises(Exception, match="403"):
            obstore.put(store(**wrong), place, b"content")
    for key in (
        f"{access.organization_id}/{'0' * 32}/other",
        f"{'1' * 36}/{'0' * 32}/context.tar",
        f"{access.organization_id}/{'0' * 31}%2f/context.tar",
    ):
        with pytest.raises(Exception, match="403"):
            obstore.put(good, key, b"content")
    url = f"{access.storage_url}/{access.bucket}/{place}"
    assert asked(daytona, "PUT", url)[0] == 403
    assert asked(daytona, "PUT", obstore.sign(good, "PUT", place, timedelta(minutes=5)))[0] == 403
    assert asked(daytona, "PUT", url, Host="example.org")[0] == 403
    assert "AccessDenied" in asked(daytona, "PUT", url, Authorization="AWS4-HMAC-SHA256 x")[1]
    with pytest.raises(FileNotFoundError):
        obstore.head(good, place)
    obstore.put(good, place, b"content")
    assert obstore.head(good, place)["size"] == 7
    with pytest.raises(Exception, match="405"):  # nothing is read back
        obstore.get(good, place)


def test_a_context_that_was_never_sent_fails_the_build_by_name(daytona: Handle, daytona_client: Any) -> None:
    api: Any = pytest.importorskip("daytona_api_client")
    snapshots = daytona_client.snapshot._SnapshotService__snapshots_api
    for given, said in ((["f" * 32], "was not uploaded"), (["../../etc"], "must be a hash")):
        build = api.CreateBuildInfo(dockerfile_content="FROM x\nCOPY a /a", context_hashes=given)
        try:
            made = snapshots.create_snapshot(api.CreateSnapshot(name="without", build_info=build))
            while (found := snapshots.get_snapshot(made.id)).state == "building":
                pass
            reason = found.error_reason
            snapshots.remove_snapshot(made.id)
        except api.ApiException as error:
            reason = str(error.body)
        assert said in reason


def test_what_is_too_large_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    obstore: Any = pytest.importorskip("obstore")
    from obstore.store import S3Store

    from lowtide.emulators.ground import Ground, Settings

    monkeypatch.setattr(storage, "LARGEST_OBJECT", 8 << 20)
    monkeypatch.setattr(storage, "LARGEST_TOTAL", 12 << 20)

    async def check() -> None:
        async with Ground(Settings(names=("daytona",), home=tmp_path)) as ground:
            kept: Any = ground.emulators["daytona"]
            kept = kept.snapshots.storage
            access = await kept.access()
            store = S3Store(
                bucket=access["bucket"],
                endpoint=access["storageUrl"],
                region=access["region"],
                access_key_id=access["accessKey"],
                secret_access_key=access["secret"],
                session_token=access["sessionToken"],
                client_options={"root_certificate": Path(ground.certificate_bundle).read_text()},
                retry_config={"max_retries": 0},
            )

            async def put(number: int, size: int) -> None:
                key = f"{access['organizationId']}/{number:032x}/context.tar"
                await obstore.put_async(
                    store, key, (os.urandom(1 << 20) for _ in range(size)), chunk_size=5 << 20
                )

            await put(1, 7)
            for size in (6, 9):  # more than all may have, and than one may have
                with pytest.raises(Exception, match="EntityTooLarge"):
                    await put(2, size)
            for upload_id, upload in list(kept._uploads.items()):
                kept._forget(upload_id, upload)
            assert (await obstore.head_async(store, f"{access['organizationId']}/{1:032x}/context.tar"))[
                "size"
            ] == 7 << 20
            async with asyncio.timeout(60):  # what was still coming in is given up
                while kept._bytes != 7 << 20:
                    await asyncio.sleep(0.01)
            assert [path.name for path in kept._directory.iterdir()] == [f"{1:032x}.tar"]

    asyncio.run(check())
