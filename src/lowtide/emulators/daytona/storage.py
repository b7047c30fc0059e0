"""The object storage that the SDK sends a build's local files to: a few calls of S3, over TLS, signed, and bounded.

An object is the tar of one path, under the organization and a hash of its own: nothing else can be written, and no
object can be read back.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.daytona.answers import Refused
from lowtide.emulators.daytona.signature import Credentials, WrongSignature, check
from lowtide.emulators.dockerfile import CannotBuild
from lowtide.emulators.request_check import check_origin, whole_number
from lowtide.emulators.web import HttpServer

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

BUCKET, REGION = "daytona-volume-builds", "us-east-1"
LARGEST_OBJECT = 1 << 30
LARGEST_TOTAL = 8 << 30
MOST_OBJECTS = 10_000
MOST_CONTEXTS = 1000
_GOOD_FOR_SECONDS = 3600.0
_MOST_KEYS, _MOST_UPLOADS, _MOST_PARTS = 1000, 64, 10_000
_LARGEST_LIST = 4 << 20  # of parts
_HASH = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(rb"<PartNumber>([0-9]{1,5})</PartNumber>")
_TAG = re.compile(rb"<ETag>(?:&quot;|&#34;|\")?([0-9a-f]{32})(?:&quot;|&#34;|\")?</ETag>")
_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_STATUS = {"NoSuchKey": 404, "NoSuchUpload": 404, "NoSuchBucket": 404, "MethodNotAllowed": 405}


class _No(Exception):
    """`code` is what S3 calls it."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.code, self.status = code, status or _STATUS.get(code, 400)


@dataclass(eq=False, slots=True, kw_only=True)
class _Upload:
    """One that comes in parts: of each its tag and size, in files beside it."""

    context: str
    parts: dict[int, tuple[str, int]] = field(default_factory=dict)


class Storage:
    def __init__(self, ground: Ground, organization_id: str) -> None:
        self._ground, self._organization_id = ground, organization_id
        self._given: dict[str, Credentials] = {}
        self._uploads: dict[str, _Upload] = {}
        self._objects = self._bytes = 0
        """Of all objects and parts, those under way too."""
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._http = HttpServer(app, refusal=_refusal, passed_on=lambda request: True, allow_remote=True)

    async def access(self) -> dict[str, str]:
        """What the SDK needs to send files here for an hour."""
        now = time.time()
        self._given = {key: one for key, one in self._given.items() if one.expires_at > now}
        while len(self._given) >= _MOST_KEYS:  # one is asked for with each image
            del self._given[next(iter(self._given))]
        given = Credentials(
            access_key=secrets.token_hex(10).upper(),
            secret=secrets.token_hex(20),
            session_token=secrets.token_hex(32),
            expires_at=now + _GOOD_FOR_SECONDS,
        )
        self._given[given.access_key] = given
        return {
            "accessKey": given.access_key,
            "secret": given.secret,
            "sessionToken": given.session_token,
            "storageUrl": await self._url(),
            "organizationId": self._organization_id,
            "bucket": BUCKET,
            "region": REGION,
        }

    def contexts(self, build: dict[str, Any]) -> tuple[Path, ...]:
        """The tars that a recipe's `contextHashes` name. CannotBuild for what was never sent."""
        found = []
        for one in hashes_of(build):
            place = self._place(one)
            if not place.exists():
                raise CannotBuild(f"the build context {one} was not uploaded")
            found.append(place)
        return tuple(found)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._http.aclose()

    async def _url(self) -> str:
        settings = self._ground.settings
        name = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104
        async with self._opening:
            if self._server is None:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                await self._http.start()
                self._server = await asyncio.get_running_loop().create_server(
                    self._http.connection, settings.host, 0, ssl=self._ground.authority.context(name)
                )
        port = self._server.sockets[0].getsockname()[1]
        return f"https://{f'[{name}]' if ':' in name else name}:{port}"

    @property
    def _directory(self) -> Path:
        return self._ground.state.directory / "contexts"

    def _place(self, context: str) -> Path:
        return self._directory / f"{context}.tar"

    def _part(self, upload_id: str, number: int) -> Path:
        return self._directory / f".{upload_id}-{number}"

    # ------------------------------------------------------------ the calls

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            if not self._ground.settings.allow_remote:
                check_origin(request)
            if len({name.lower() for name, _ in request.raw_headers}) != len(request.raw_headers):
                raise _No("InvalidRequest", "a header comes twice")
            head, now = request.headers, time.time()
            body = check(request.method, request.raw_path, head, self._given.get, region=REGION, now=now)
            return await self._do(request, body)
        except WrongSignature as error:
            return _xml_error(error.code, "the request is not signed by who may send it", 403)
        except _No as error:
            return _xml_error(error.code, str(error), error.status)
        except OSError as error:
            return _xml_error("InternalError", f"it cannot be kept: {error.strerror}", 500)

    async def _do(self, request: web.Request, body: str) -> web.StreamResponse:
        bucket, _, key = request.path.lstrip("/").partition("/")
        if bucket != BUCKET:
            raise _No("NoSuchBucket", "there is no such bucket")
        query = request.query
        if request.method == "GET" and not key and query.get("list-type") == "2":
            return self._list(query.get("prefix", ""))
        context = self._context(key)
        match request.method, "uploads" in query, "uploadId" in query:
            case "HEAD", False, False:
                return self._head(context)
            case "PUT", False, False:
                return await self._put(request, body, context)
            case "POST", True, False:
                return self._begin(context)
            case "PUT", False, True:
                return await self._put_part(request, body, context)
            case "POST", False, True:
                return await self._complete(request, body, context)
            case "DELETE", False, True:
                self._forget(query["uploadId"], self._upload(request, context))
                return web.Response(status=204)
        raise _No("MethodNotAllowed", "nothing but uploads of build contexts")

    def _context(self, key: str) -> str:
        organization, _, rest = key.partition("/")
        context, _, name = rest.partition("/")
        if organization != self._organization_id or not _HASH.fullmatch(context) or name != "context.tar":
            raise _No("AccessDenied", "the key may not be used with these credentials", 403)
        return context

    def _list(self, prefix: str) -> web.Response:
        context = prefix.removeprefix(f"{self._organization_id}/").rstrip("/")
        there = bool(_HASH.fullmatch(context)) and self._place(context).exists()
        item = (
            f"<Contents><Key>{html.escape(prefix)}context.tar</Key><Size>1</Size></Contents>" if there else ""
        )
        return _xml(
            f"<ListBucketResult><Name>{BUCKET}</Name><KeyCount>{int(there)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>{item}</ListBucketResult>"
        )

    def _head(self, context: str) -> web.Response:
        try:
            found = self._place(context).stat()
        except FileNotFoundError:
            raise _No("NoSuchKey", "there is no such object") from None
        headers = {"ETag": f'"{context}"', "Content-Length": str(found.st_size)}
        moment = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(found.st_mtime))
        return web.Response(headers={**headers, "Last-Modified": moment})

    async def _put(self, request: web.Request, body: str, context: str) -> web.Response:
        draft = self._directory / f".{secrets.token_hex(8)}"
        try:
            tag, _ = await self._receive(request, body, draft)
            self._keep(draft, context)
        finally:
            draft.unlink(missing_ok=True)
        return web.Response(headers={"ETag": f'"{tag}"'})

    def _keep(self, draft: Path, context: str) -> None:
        place = self._place(context)
        before = place.stat().st_size if place.exists() else None
        if before is None and self._objects >= MOST_OBJECTS:
            self._bytes -= draft.stat().st_size
            raise _No("TooManyObjects", f"there are {MOST_OBJECTS} objects at most")
        draft.rename(place)
        self._bytes -= before or 0
        self._objects += before is None

    def _begin(self, context: str) -> web.Response:
        while len(self._uploads) >= _MOST_UPLOADS:  # who left in the midst says nothing
            upload_id, upload = next(iter(self._uploads.items()))
            self._forget(upload_id, upload)
        upload_id = secrets.token_hex(16)
        self._uploads[upload_id] = _Upload(context=context)
        return _xml(
            f"<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><UploadId>{upload_id}</UploadId>"
            "</InitiateMultipartUploadResult>"
        )

    def _upload(self, request: web.Request, context: str) -> _Upload:
        found = self._uploads.get(request.query["uploadId"])
        if found is None or found.context != context:
            raise _No("NoSuchUpload", "there is no such upload")
        return found

    async def _put_part(self, request: web.Request, body: str, context: str) -> web.Response:
        upload, upload_id = self._upload(request, context), request.query["uploadId"]
        number = whole_number(request.query.get("partNumber", ""))
        if number is None or not 1 <= number <= _MOST_PARTS:
            raise _No("InvalidArgument", f"a part number is from 1 to {_MOST_PARTS}")
        draft = self._directory / f".{secrets.token_hex(8)}"
        try:
            others = sum(size for one, (_, size) in upload.parts.items() if one != number)
            tag, size = await self._receive(request, body, draft, LARGEST_OBJECT - others)
            if self._uploads.get(upload_id) is not upload:
                self._bytes -= size
                raise _No("NoSuchUpload", "there is no such upload")
            draft.rename(self._part(upload_id, number))
            self._bytes -= upload.parts.get(number, ("", 0))[1]
            upload.parts[number] = (tag, size)
        finally:
            draft.unlink(missing_ok=True)
        return web.Response(headers={"ETag": f'"{tag}"'})

    async def _complete(self, request: web.Request, body: str, context: str) -> web.Response:
        upload, upload_id = self._upload(request, context), request.query["uploadId"]
        data = b"".join([piece async for piece in _pieces(request, body, _LARGEST_LIST)])
        numbers = []
        for part in data.split(b"</Part>")[
            :-1
        ]:  # no pattern over all of it: one that begins often and never ends
            number, tag = _NUMBER.search(part), _TAG.search(part)
            if number is None or tag is None or upload.parts.get(int(number[1]), ("",))[0] != tag[1].decode():
                raise _No("InvalidPart", "a part was not uploaded as it is named")
            numbers.append(int(number[1]))
        if not numbers or numbers != sorted(set(numbers)):
            raise _No("InvalidPartOrder", "parts are named once, in their order")
        size = sum(upload.parts[number][1] for number in numbers)
        if size > LARGEST_OBJECT:
            raise _No("EntityTooLarge", f"an object has {LARGEST_OBJECT} bytes at most")
        if (
            self._uploads.pop(upload_id, None) is not upload
        ):  # completed by another call; nothing is added from here on
            raise _No("NoSuchUpload", "there is no such upload")
        draft = self._directory / f".{secrets.token_hex(8)}"
        try:
            parts = [self._part(upload_id, number) for number in numbers]
            await asyncio.to_thread(_join, parts, draft)
            self._bytes += size
            self._keep(draft, context)
        finally:
            draft.unlink(missing_ok=True)
            self._forget(upload_id, upload)
        return _xml(
            f"<CompleteMultipartUploadResult><Bucket>{BUCKET}</Bucket>"
            f'<Key>{html.escape(request.path.partition("/")[2])}</Key><ETag>"{context}"</ETag>'
            "</CompleteMultipartUploadResult>"
        )

    def _forget(self, upload_id: str, upload: _Upload) -> None:
        self._uploads.pop(upload_id, None)
        for number, (_, size) in upload.parts.items():
            self._part(upload_id, number).unlink(missing_ok=True)
            self._bytes -= size
        upload.parts.clear()

    async def _receive(
        self, request: web.Request, body: str, draft: Path, most: int = LARGEST_OBJECT
    ) -> tuple[str, int]:
        """Write what is sent: its MD5, which is the tag, and its size, which counts from then on."""
        digest, hashed, size = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
        try:
            with draft.open("xb") as file:
                async for piece in _pieces(request, body, most):
                    size += len(piece)
                    self._bytes += len(piece)
                    if self._bytes > LARGEST_TOTAL:
                        raise _No("EntityTooLarge", f"all objects have {LARGEST_TOTAL} bytes at most")
                    digest.update(piece)
                    hashed.update(piece)
                    file.write(piece)
            if len(body) == 64 and hashed.hexdigest() != body:
                raise _No("XAmzContentSHA256Mismatch", "the body is not the one that was signed")
        except BaseException:
            self._bytes -= size
            raise
        return digest.hexdigest(), size


def hashes_of(build: Any) -> list[str]:
    """The `contextHashes` of a recipe. Refused for what is none."""
    given = build.get("contextHashes") if isinstance(build, dict) else None
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(one, str) and _HASH.fullmatch(one) for one in given):
        raise Refused(400, "each value in contextHashes must be a hash")
    if len(given) > MOST_CONTEXTS:
        raise Refused(400, f"contextHashes holds {MOST_CONTEXTS} at most")
    return list(dict.fromkeys(given))


async def _pieces(request: web.Request, body: str, most: int) -> AsyncIterator[bytes]:
    """The body as the signer calls it: plain, or in chunks with a trailer of their own."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "aws-chunked"):
        raise _No("InvalidArgument", "an encoding that is not known here")
    size = 0
    if body == _TRAILER:
        source = _chunks(request.content)
    elif body == "UNSIGNED-PAYLOAD" or re.fullmatch(r"[0-9a-f]{64}", body):
        source = request.content.iter_chunked(1 << 18)
    else:
        raise _No("NotImplemented", "bodies are signed whole, or not", 501)
    async for piece in source:
        size += len(piece)
        if size > most:
            raise _No("EntityTooLarge", f"an object has {LARGEST_OBJECT} bytes at most")
        yield piece


async def _chunks(content: Any) -> AsyncIterator[bytes]:
    while True:
        try:
            line = await content.readline()
        except ValueError:
            line = b""
        found = re.fullmatch(rb"([0-9a-fA-F]{1,8})\r\n", line)
        if found is None:
            raise _No("IncompleteBody", "a chunk does not say how long it is")
        left = int(found[1], 16)
        if not left:
            async for _ in content.iter_chunked(1 << 16):
                pass  # checksums: TLS has kept what they keep
            return
        while left:
            piece = await content.read(min(left, 1 << 18))
            if not piece:
                raise _No("IncompleteBody", "a chunk is shorter than it says")
            left -= len(piece)
            yield piece
        if await content.readline() != b"\r\n":
            raise _No("IncompleteBody", "a chunk is longer than it says")


def _join(parts: list[Path], draft: Path) -> None:
    with draft.open("xb") as file:
        for part in parts:
            with part.open("rb") as one:
                shutil.copyfileobj(one, file, 1 << 20)


def _xml(text: str, status: int = 200) -> web.Response:
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return web.Response(text=head + text, status=status, content_type="application/xml")


def _xml_error(code: str, message: str, status: int) -> web.Response:
    return _xml(f"<Error><Code>{code}</Code><Message>{html.escape(message)}</Message></Error>", status)


def _refusal(request: web.Request, status: int, message: str) -> web.StreamResponse:
    return _xml_error("AccessDenied" if status == 403 else "InvalidRequest", message, status)
