"""Who has a key of Daytona's storage cannot hold the emulator up with it, nor fill it with names."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lowtide.emulators.daytona import storage
from lowtide.emulators.ground import Ground, Settings

pytest.importorskip("daytona")


class Caller:
    """Signs and sends as a store's own client does, whatever it is told to."""

    def __init__(self, access: dict[str, str], certificates: str) -> None:
        self._access, self._context = access, ssl.create_default_context(cafile=certificates)

    async def __call__(
        self, method: str, number: int, query: str = "", body: bytes = b"", token: bytes = b""
    ) -> tuple[int, bytes]:
        access, url = self._access, urlsplit(self._access["storageUrl"])
        path = f"/{access['bucket']}/{access['organizationId']}/{number:032x}/context.tar"
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        digest, scope = hashlib.sha256(body).hexdigest(), f"{now[:8]}/{access['region']}/s3/aws4_request"
        headers = {"host": url.netloc, "x-amz-content-sha256": digest, "x-amz-date": now}
        headers["x-amz-security-token"] = access["sessionToken"]
        names = ";".join(headers)
        lines = [method, path, query, *(f"{name}:{value}" for name, value in headers.items())]
        hashed = hashlib.sha256("\n".join([*lines, "", names, digest]).encode()).hexdigest()
        key = f"AWS4{access['secret']}".encode()
        for word in scope.split("/"):
            key = hmac.digest(key, word.encode(), "sha256")
        signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashed}".encode(), "sha256").hex()
        credential = f"{access['accessKey']}/{scope}"
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
        )
        head = f"{method} {path}{'?' if query else ''}{query} HTTP/1.1\r\ncontent-length: {len(body)}\r\n"
        head += "connection: close\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        sent = head.encode().replace(
            access["sessionToken"].encode(), token or access["sessionToken"].encode()
        )
        reader, writer = await asyncio.open_connection(url.hostname, url.port, ssl=self._context)
        writer.write(sent + b"\r\n" + body)
        answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1]), answer


def test_a_key_is_good_for_uploads_and_for_no_mischief(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MOST_OBJECTS", 3)
    monkeypatch.setattr(storage, "_MOST_KEYS", 5)

    async def check() -> None:
        async with Ground(Settings(names=("daytona",), home=tmp_path)) as ground:
            kept: Any = ground.emulators["daytona"]
            kept = kept.snapshots.storage
            for _ in range(8):  # one for each image: the oldest go, and nobody is refused
                access = await kept.access()
            call = Caller(access, ground.certificate_bundle)
            assert (await call("PUT", 1, token=b"\xff\xfe"))[0] == 403
            _, begun = await call("POST", 1, "uploads=")
            upload = begun.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
            assert (await call("PUT", 1, f"partNumber=1&uploadId={upload}", b"part"))[0] == 200
            async with asyncio.timeout(60):  # a pattern over all of it would take hours, and hold everyone up
                assert (await call("POST", 1, f"uploadId={upload}", b"<Part>" * 400_000))[0] == 400
            tag = hashlib.md5(b"part").hexdigest()
            listed = f"<Part><PartNumber>1</PartNumber><ETag>{tag}</ETag></Part>".encode()
            ends = await asyncio.gather(
                *(call("POST", 1, f"uploadId={upload}", listed) for _ in range(4)),
            )
            assert sorted(status for status, _ in ends) == [200, 404, 404, 404]
            statuses = [(await call("PUT", number, body=b"x"))[0] for number in (1, 2, 3, 4, 2)]
            assert statuses == [200, 200, 200, 400, 200]
            assert (kept._bytes, len(list(kept._directory.iterdir()))) == (3, 3)

    asyncio.run(check())
