"""Fetching an image from a registry: reference, credentials, manifests and blobs, each checked by its digest."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    MissingDependencyError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.images import documents
from lowtide.providers.images.bounds import MAX_DOCUMENT_BYTES, MAX_INDEXES, check_layers

INSTALL = "pip install 'lowtide[oci]'"
_HUB, _HUB_ACCOUNT = "registry-1.docker.io", "https://index.docker.io/v1/"
_REFERENCE = re.compile(
    r"(?:(?P<host>localhost(?::\d+)?|[\w-]+(?:\.[\w-]+)+(?::\d+)?|[\w-]+:\d+|\[[0-9a-f:]+\](?::\d+)?)/)?"
    r"(?P<path>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_CONNECT_SECONDS, _READ_SECONDS = 5.0, 60.0
_ATTEMPTS = 3
_CHUNK = 1 << 20
_UNREACHABLE_SECONDS = 60.0
_unreachable: dict[str, tuple[float, str]] = {}  # registry -> until when, why


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """`[registry/]name[:tag][@digest]`, as docker reads it."""

    registry: str
    path: str
    tag: str
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        match = _REFERENCE.fullmatch(text)
        if match is None or len(text) > 1024:
            raise ValidationError(
                f"{text!r} is not an image reference", argument="container_image", provider="local"
            )
        registry, path = match["host"] or "docker.io", match["path"]
        if registry in ("docker.io", "index.docker.io"):
            registry = _HUB
            path = path if "/" in path else f"library/{path}"
        return cls(registry=registry, path=path, tag=match["tag"] or "latest", digest=match["digest"])

    @property
    def plain(self) -> bool:
        """Whether plain HTTP is spoken: only on this machine, as docker does it."""
        host = self.registry.rpartition(":")[0] if ":" in self.registry else self.registry
        return host in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    digest: str
    size: int
    media_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteImage:
    """What one platform's image is made of. Nothing of the layers has been fetched."""

    digest: str
    layers: tuple[Blob, ...]
    diff_ids: tuple[str, ...]
    config: Mapping[str, Any]


class Registry:
    """One repository at one registry. The protocol and the logins are oras's."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        try:
            import oras.container
            import oras.provider
            import requests.adapters
        except ImportError as error:
            raise MissingDependencyError(
                f"pulling images needs the extra `oci`: {INSTALL}", install=INSTALL, provider="local"
            ) from error

        class Bounded(requests.adapters.HTTPAdapter):
            """oras sets no timeouts, and reads a token whole; requests does so with what comes with a redirect."""

            def send(self, *args: Any, **kwargs: Any) -> Any:
                kwargs["timeout"] = (_CONNECT_SECONDS, _READ_SECONDS)
                answer = super().send(*args, **kwargs)
                if answer.is_redirect or not kwargs.get("stream"):
                    _read_bounded(answer)
                return answer

        class Once(oras.provider.Registry):  # type: ignore[misc]
            """oras tries again after any fault, a refused login included, for two minutes."""

            do_request = getattr(
                oras.provider.Registry.do_request, "__wrapped__", oras.provider.Registry.do_request
            )

        def connect(auth_backend: str) -> Any:
            made = Once(hostname=reference.registry, insecure=reference.plain, auth_backend=auth_backend)
            for scheme in ("http://", "https://"):
                made.session.mount(scheme, Bounded())
            return made

        name = f"{reference.registry}/{reference.path}:{reference.tag}"
        self._container = oras.container.Container(name, registry=reference.registry)
        self._registry = connect("token")
        if self._challenge().lower().startswith("basic"):
            self._registry = connect("basic")
        account = oras.container.Container(name, registry=reference.registry)
        if reference.registry == _HUB:
            account.registry = _HUB_ACCOUNT  # what `docker login` files it under
        self._registry.auth.load_configs(account)

    def _challenge(self) -> str:
        """How the registry wants to be asked. Once without oras, which would try an absent one for minutes."""
        import requests

        until, why = _unreachable.get(self.reference.registry, (0.0, ""))
        if time.monotonic() >= until:
            try:
                url = f"{self._registry.prefix}://{self.reference.registry}/v2/"
                with self._registry.session.get(url, stream=True) as answer:
                    return str(answer.headers.get("WWW-Authenticate", ""))
            except requests.RequestException as error:
                why = _cause(error)
                _unreachable[self.reference.registry] = (time.monotonic() + _UNREACHABLE_SECONDS, why)
        raise SandboxUnavailableError(
            f"the registry {self.reference.registry} cannot be reached: {why}",
            provider="local",
            retryable=True,
        )

    def image(self) -> RemoteImage:
        """The image for this machine, whether the reference names it or an index of several."""
        wanted = self.reference.digest
        document, digest = self._manifest(wanted or self.reference.tag, wanted)
        for _ in range(MAX_INDEXES):
            if "manifests" not in document:
                break
            chosen = documents.digest(documents.for_this_machine(document).get("digest"))
            document, digest = self._manifest(chosen, chosen)
        if "layers" not in document or "config" not in document:
            raise self._bad("its manifest is of a kind that is not known here")
        layers = tuple(map(_blob, documents.mappings(document["layers"], "layers")))
        check_layers(len(layers))
        described = _blob(documents.mapping(document["config"], "configuration"))
        content = b"".join(self.blob(described, most=MAX_DOCUMENT_BYTES))
        config = documents.mapping(documents.parse(content, "configuration"), "configuration")
        found = documents.mapping(config.get("rootfs") or {}, "list of layers").get("diff_ids")
        diff_ids = tuple(map(documents.digest, documents.words(found, "layers")))
        if len(diff_ids) != len(layers):
            raise self._bad("its configuration does not fit its layers")
        settings = documents.mapping(config.get("config") or {}, "configuration")
        return RemoteImage(digest=digest, layers=layers, diff_ids=diff_ids, config=settings)

    def _manifest(self, name: str, digest: str | None) -> tuple[Mapping[str, Any], str]:
        url = f"{self._registry.prefix}://{self._container.manifest_url(name)}"
        with self._get(url, {"Accept": ", ".join(_MANIFESTS)}) as answer:
            content = b"".join(_at_most(answer.iter_content(_CHUNK), MAX_DOCUMENT_BYTES, self))
        found = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if digest is not None and found != digest:
            raise self._bad(f"what the registry sent for {digest} is {found}")
        return documents.mapping(documents.parse(content, "manifest"), "manifest"), found

    def blob(self, blob: Blob, *, most: int | None = None) -> Iterator[bytes]:
        """Its bytes. The last ones are only handed out when size and digest are right."""
        if most is not None and blob.size > most:
            raise self._bad(f"{blob.digest} is too large for what it is")
        url = f"{self._registry.prefix}://{self._container.get_blob_url(blob.digest)}"
        hashed, count, held = hashlib.sha256(), 0, b""
        with self._get(url, {}) as answer:
            for chunk in _at_most(answer.iter_content(_CHUNK), blob.size, self):
                if held:
                    yield held
                hashed.update(chunk)
                count += len(chunk)
                held = chunk
        if count != blob.size or f"sha256:{hashed.hexdigest()}" != blob.digest:
            raise self._bad(f"what the registry sent for {blob.digest} is not that")
        yield held

    def _get(self, url: str, headers: dict[str, str]) -> Any:
        import requests

        name = f"{self.reference.registry}/{self.reference.path}"
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = self._registry.do_request(url, "GET", headers=dict(headers), stream=True)
                trouble = f"status {answer.status_code}"
            except (ValueError, AttributeError) as error:
                if isinstance(error, requests.RequestException):
                    raise
                raise self._refused() from error  # oras: it has nothing to log in with
            except requests.RequestException as error:
                answer, trouble = None, _cause(error)
            if answer is not None and answer.status_code < 500 and answer.status_code != 429:
                break
            if attempt == _ATTEMPTS:
                raise SandboxUnavailableError(
                    f"{name} could not be pulled: {trouble}", provider="local", retryable=True
                )
            time.sleep(0.5 * attempt)
        assert answer is not None
        if answer.status_code in (401, 403):
            raise self._refused()
        if answer.status_code == 404:
            raise ValidationError(
                f"the registry has no image {name}:{self.reference.digest or self.reference.tag}",
                argument="container_image",
                provider="local",
            )
        if answer.status_code != 200:
            raise self._bad(f"the registry answered with status {answer.status_code}")
        return answer

    def _refused(self) -> LowtideError:
        host = "" if self.reference.registry == _HUB else f" {self.reference.registry}"
        return AuthenticationError(
            f"the registry does not let {self.reference.path} be pulled (it may not exist). `docker login{host}` "
            "writes the credentials that are used here",
            provider="local",
        )

    def _bad(self, why: str) -> LowtideError:
        return ValidationError(
            f"the image {self.reference.registry}/{self.reference.path} cannot be used: {why}",
            argument="container_image",
            provider="local",
        )


def save(chunks: Iterator[bytes], file: IO[bytes]) -> None:
    for chunk in chunks:
        file.write(chunk)


def _blob(descriptor: Mapping[str, Any]) -> Blob:
    size = descriptor.get("size")
    if not isinstance(size, int) or size < 0:
        raise documents.bad("a part of it has no size")
    return Blob(
        digest=documents.digest(descriptor.get("digest")),
        size=size,
        media_type=str(descriptor.get("mediaType", "")),
    )


def _read_bounded(answer: Any) -> None:
    """Read an answer here, as far as a document may be large: whoever asks for its content finds it read."""
    import requests

    found = b""
    for chunk in answer.iter_content(_CHUNK):
        found += chunk
        if len(found) > MAX_DOCUMENT_BYTES:
            answer.close()
            raise requests.RequestException(f"an answer of more than {MAX_DOCUMENT_BYTES} bytes")
    answer._content = found  # iter_content has marked it as consumed


def _at_most(chunks: Iterator[bytes], most: int, registry: Registry) -> Iterator[bytes]:
    import requests

    count = 0
    try:
        for chunk in chunks:
            count += len(chunk)
            if count > most:
                raise registry._bad("the registry sends more than it said")
            yield chunk
    except requests.RequestException as error:
        raise SandboxUnavailableError(
            f"the transfer from {registry.reference.registry} broke off: {_cause(error)}",
            provider="local",
            retryable=True,
        ) from error


def _cause(error: BaseException) -> str:
    """The innermost reason: requests wraps urllib3 wraps the system's."""
    text = str(error)
    for wanted in (
        "Name or service not known",
        "Connection refused",
        "timed out",
        "certificate verify failed",
    ):
        if wanted in text:
            return wanted
    return f"{type(error).__name__}: {text[:200]}"
