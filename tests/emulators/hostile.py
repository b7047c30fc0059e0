"""Malformed requests for every call a client knows: each field of each model, each body, each header, wrongly."""

from __future__ import annotations

import gzip
import http.client
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

WRONG: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    10**12,
    10**30,
    1.5,
    1e308,
    "",
    "x",
    "\0",
    "\u0663",  # a digit, and not an ASCII one
    "a" * 70_000,
    "../../../etc/passwd",
    [],
    [None],
    ["x", 1],
    {},
    {"a": 1},
    {"a": {"b": [{}]}},
)
"""What JSON can carry and no field expects."""

BODIES: tuple[bytes, ...] = (
    b"",
    b"no JSON",
    b"[]",
    b"null",
    b'"text"',
    b"1",
    b"{",
    b"NaN",
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": "\\ud800"}',
    b'{"\\udfff": 1}',
    b'{"a": "\xff"}',
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b"[" * 100_000,
)
"""What is no body of any call."""

HEADERS: tuple[dict[bytes, bytes], ...] = (
    {b"Host": b"["},
    {b"Host": b"http://["},
    {b"Host": b"127.0.0.1:99999999"},
    {b"Host": b"\xff"},
    {b"Origin": b"["},
    {b"Origin": b"http://["},
    {b"Origin": b"\xc3("},
    {b"Authorization": b"Bearer \xff\xfe"},
    {b"Authorization": b"Basic \xff"},
    {b"X-API-KEY": b"\xed\xa0\x80"},
    {b"X-Access-Token": b"\xff"},
    {b"Content-Type": b"application/json; charset=no-such"},
    {b"Content-Type": b"application/json; charset=utf-16"},
    {b"Content-Type": b"multipart/form-data"},
    {b"Content-Type": b"multipart/form-data; boundary="},
    {b"Content-Type": b";;;"},
    {b"Content-Encoding": b"gzip"},
    {b"Content-Encoding": b"deflate"},
    {b"Content-Encoding": b"no-such"},
    {b"E2b-Sandbox-Port": b"\xd9\xa3"},
    {b"E2b-Sandbox-Port": b"99999999999999999999"},
    {b"Connect-Timeout-Ms": b"\xc2\xb2"},
    {b"Connect-Timeout-Ms": b"9" * 400},
    {b"Keepalive-Ping-Interval": b"9" * 400},
    {b"Idempotency-Key": b"\xff"},
    {b"Range": b"bytes=9-1"},
    {b"If-Modified-Since": b"never"},
)


_FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n'
UPLOAD_PATH = b'--b\r\nContent-Disposition: form-data; name="path"\r\n\r\n/tmp/x\r\n'
UPLOADS = (
    b"garbage",
    b"--b\r\n",
    b"--b\r\nno header\r\n\r\nx\r\n--b--\r\n",
    _FILE + b"\r\nnot all of it",
)
"""What is no multipart body with the boundary b, or not all of it."""


ENVD: dict[str, dict[str, dict[str, Any]]] = {
    "process.Process": {
        "List": {},
        "Update": {"process": {"pid": 1}, "pty": {"size": {"cols": 80, "rows": 24}}},
        "SendInput": {"process": {"pid": 1}, "input": {"stdin": "YQ=="}},
        "SendSignal": {"process": {"pid": 999_999}, "signal": "SIGNAL_SIGTERM"},
        "CloseStdin": {"process": {"pid": 1}},
    },
    "filesystem.Filesystem": {
        "Stat": {"path": "/tmp"},
        "MakeDir": {"path": "/tmp/made"},
        "Move": {"source": "/tmp/a", "destination": "/tmp/b"},
        "ListDir": {"path": "/tmp", "depth": 1},
        "Remove": {"path": "/tmp/none"},
        "CreateWatcher": {"path": "/tmp", "recursive": False},
        "GetWatcherEvents": {"watcherId": "none"},
        "RemoveWatcher": {"watcherId": "none"},
    },
}
"""The unary calls of the daemon in an E2B sandbox, each with a body that would do."""

SLOWEST_SECONDS = 20.0


class Sender:
    """Plain HTTP over one connection, with whatever bytes a test wants in a header."""

    def __init__(self, base: str, headers: dict[bytes, bytes]) -> None:
        parts = urlsplit(base)
        self.prefix, self.netloc, self.headers = parts.path, parts.netloc, headers
        self.connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=SLOWEST_SECONDS
        )

    def __call__(
        self, method: str, path: str, body: bytes = b"", headers: dict[bytes, bytes] | None = None
    ) -> tuple[int, bytes]:
        sent = {
            b"Host": self.netloc.encode(),
            b"Content-Type": b"application/json",
            **self.headers,
            **(headers or {}),
        }
        try:
            self.connection.putrequest(method, self.prefix + path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                self.connection.putheader(name, value)  # type: ignore[arg-type]
            self.connection.putheader("Content-Length", str(len(body)))
            self.connection.endheaders(body)
            answer = self.connection.getresponse()
            return answer.status, answer.read(4_000_000)
        except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
            self.connection.close()
            if isinstance(error, TimeoutError):
                raise AssertionError(f"{method} {path}: no answer in {SLOWEST_SECONDS:.0f} s") from None
            return 0, b""

    def json(self, method: str, path: str, body: Any = None) -> Any:
        status, data = self(method, path, b"" if body is None else json.dumps(body).encode())
        assert 200 <= status < 300, (method, path, status, data)
        return json.loads(data) if data else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a service, as its client has it."""

    method: str
    path: str
    fields: tuple[str, ...] = ()
    """Of the body, where it has one."""
    sample: dict[str, Any] = field(default_factory=dict)
    """A body that would do, so that a single wrong field is the only one."""
    query: tuple[str, ...] = ()
    model: Any = None
    """The type of the body in the client, where it has one."""


def bodies(call: Call) -> Iterator[bytes]:
    """Wrong bodies of one call: each field wrongly, one at a time, then what is no body at all."""
    for name in call.fields:
        for value in WRONG:
            yield json.dumps({**call.sample, name: value}).encode()
        yield json.dumps({key: value for key, value in call.sample.items() if key != name}).encode()
    yield from BODIES
    yield gzip.compress(b"0" * 1_000_000)


def from_pydantic_client(package: str) -> Iterator[Call]:
    """The calls of a client that was generated with pydantic models: Daytona's."""
    from pydantic import BaseModel

    api = importlib.import_module(f"{package}.api")
    for found in pkgutil.iter_modules(api.__path__, f"{package}.api."):
        module = importlib.import_module(found.name)
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ != module.__name__:
                continue
            for name, serialize in inspect.getmembers(kind, inspect.isfunction):
                if not name.endswith("_serialize"):
                    continue
                text = inspect.getsource(serialize)
                sent = re.search(r"method='(\w+)',\s*resource_path='([^']+)'", text)
                if sent is None:
                    continue
                models = [
                    part
                    for parameter in inspect.signature(
                        getattr(kind, name.removeprefix("_").removesuffix("_serialize")), eval_str=True
                    ).parameters.values()
                    for part in _classes(parameter.annotation)
                    if issubclass(part, BaseModel)
                ]
                fields = (
                    tuple(info.alias or key for key, info in models[0].model_fields.items()) if models else ()
                )
                query = tuple(re.findall(r"_query_params\.append\(\('(\w+)'", text))
                model = models[0] if models else None
                yield Call(method=sent[1], path=sent[2], fields=fields, query=query, model=model)


def from_attrs_client(package: str) -> Iterator[Call]:
    """The calls of a client that was generated with attrs models: E2B's."""
    api = importlib.import_module(f"{package}.api")
    for found in pkgutil.walk_packages(api.__path__, f"{package}.api."):
        module = importlib.import_module(found.name)
        make = getattr(module, "_get_kwargs", None)
        if make is None:
            continue
        text = inspect.getsource(make)
        method = re.search(r'"method": "(\w+)"', text)
        path = re.search(r'"url": f?"([^"]+)"', text)
        if method is None or path is None:
            continue
        body = inspect.signature(make, eval_str=True).parameters.get("body")
        models = list(_classes(body.annotation)) if body is not None else []
        fields = tuple(re.findall(r'd\.pop\(\s*"(\w+)"', inspect.getsource(models[0]))) if models else ()
        query = tuple(re.findall(r'params\["(\w+)"\]', text))
        model = models[0] if models else None
        yield Call(method=method[1].upper(), path=path[1], fields=fields, query=query, model=model)


def from_stainless_client(package: str) -> Iterator[Call]:
    """The calls of a client that was generated by Stainless: Runloop's."""
    resources = importlib.import_module(f"{package}.resources")
    for found in pkgutil.walk_packages(resources.__path__, f"{package}.resources."):
        module = importlib.import_module(found.name)
        text = inspect.getsource(module)
        for part in re.split(r"\n    (?:async )?def ", text):
            sent = re.search(
                r'self\._(get|post|delete|put|patch|get_api_list)\(\s*(?:path_template\(\s*)?"(/[^"]+)"', part
            )
            if sent is None or "await self._" in part:
                continue
            method = "GET" if sent[1] == "get_api_list" else sent[1].upper()
            names = tuple(re.findall(r'^\s+"(\w+)": \w+,$', part, re.MULTILINE))
            body = names if method != "GET" else ()
            typed = re.search(r"\b(\w+_params)\.(\w+Params)\b", part)
            model = getattr(getattr(module, typed[1]), typed[2]) if typed is not None and body else None
            query = names if method == "GET" else ()
            yield Call(method=method, path=sent[2], fields=body, query=query, model=model)


def _classes(annotation: Any) -> Iterator[type]:
    if inspect.isclass(annotation):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _classes(part)
