"""The hosted services' own SDKs as their documentation uses them: what lowtide is compared with, one small class each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

PROGRAM, SAID = "/bin/echo", "hi"


class Sdk:
    """One client on one event loop. A box is whatever the SDK's create gives."""

    async def open(self) -> None:
        return None

    async def create(self) -> Any:
        raise NotImplementedError

    async def command(self, box: Any) -> None:
        """Runs the program, and looks at what it says."""
        raise NotImplementedError

    async def end(self, box: Any) -> None:
        raise NotImplementedError

    async def upload(self, box: Any, source: Path, path: str) -> None:
        raise NotImplementedError

    def download(self, box: Any, path: str) -> AsyncIterator[bytes]:
        raise NotImplementedError

    async def close(self) -> None:
        return None


class E2B(Sdk):
    async def create(self) -> Any:
        from e2b import AsyncSandbox

        return await AsyncSandbox.create("base", timeout=300)

    async def command(self, box: Any) -> None:
        assert (await box.commands.run(f"{PROGRAM} {SAID}")).stdout == f"{SAID}\n"

    async def end(self, box: Any) -> None:
        await box.kill()

    async def upload(self, box: Any, source: Path, path: str) -> None:
        with source.open("rb") as file:
            await box.files.write(path, file)

    async def download(self, box: Any, path: str) -> AsyncIterator[bytes]:
        async for chunk in await box.files.read(path, format="stream"):
            yield chunk


class Daytona(Sdk):
    async def open(self) -> None:
        from daytona import AsyncDaytona

        self._sdk = AsyncDaytona()

    async def create(self) -> Any:
        return await self._sdk.create()

    async def command(self, box: Any) -> None:
        assert (await box.process.exec(f"{PROGRAM} {SAID}")).result == f"{SAID}\n"

    async def end(self, box: Any) -> None:
        await box.delete(wait=True)

    async def upload(self, box: Any, source: Path, path: str) -> None:
        await box.fs.upload_file(str(source), path)

    async def download(self, box: Any, path: str) -> AsyncIterator[bytes]:
        yield await box.fs.download_file(path)

    async def close(self) -> None:
        await self._sdk.close()  # type: ignore[no-untyped-call]


class Modal(Sdk):
    """With one app and one image for all."""

    async def open(self) -> None:
        import modal

        self._create = modal.Sandbox.create.aio
        self._image = modal.Image.debian_slim(python_version="3.11")
        self._app = await modal.App.lookup.aio("raw", create_if_missing=True)

    async def create(self) -> Any:
        return await self._create(app=self._app, image=self._image)

    async def command(self, box: Any) -> None:
        process = await box.exec.aio(PROGRAM, SAID)
        assert await process.stdout.read.aio() == f"{SAID}\n"
        assert await process.wait.aio() == 0

    async def end(self, box: Any) -> None:
        await box.terminate.aio(wait=True)


class Runloop(Sdk):
    async def open(self) -> None:
        from runloop_api_client import AsyncRunloop

        self._sdk = AsyncRunloop()

    async def create(self) -> Any:
        return (await self._sdk.devboxes.create_and_await_running()).id

    async def command(self, box: Any) -> None:
        ran = await self._sdk.devboxes.execute_and_await_completion(box, command=f"{PROGRAM} {SAID}")
        assert ran.stdout == f"{SAID}\n"

    async def end(self, box: Any) -> None:
        await self._sdk.devboxes.shutdown(box)

    async def upload(self, box: Any, source: Path, path: str) -> None:
        await self._sdk.devboxes.upload_file(box, path=path, file=source)

    async def download(self, box: Any, path: str) -> AsyncIterator[bytes]:
        answer = await self._sdk.devboxes.download_file(box, path=path)
        yield await answer.read()

    async def close(self) -> None:
        await self._sdk.close()


class CoreWeave(Sdk):
    """Its calls block: one after the other, they cost the same as awaited ones."""

    async def create(self) -> Any:
        import cwsandbox

        return cwsandbox.Sandbox.run()

    async def command(self, box: Any) -> None:
        assert box.exec([PROGRAM, SAID]).result().stdout == f"{SAID}\n"

    async def end(self, box: Any) -> None:
        box.stop().result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What is measured on one provider, against what, and what counts as good."""

    sdk: type[Sdk]
    against: str
    module: str
    """The package that has to be there."""
    ends: str = ""
    """How the SDK ends a box, where it takes a word to have it confirmed, as lowtide always has."""
    life: float = 1.05
    exec: float = 0.9
    transfer: float | None = None
    at_once: bool = True

    ENDING_MS: ClassVar[float] = 1500.0


PROVIDERS = {
    "e2b": Compared(sdk=E2B, against="E2B's async SDK", module="e2b", exec=1.03, transfer=1.1),
    "daytona": Compared(
        sdk=Daytona,
        against="Daytona's async SDK",
        module="daytona",
        ends="that waits for its delete",
        life=1.08,
        exec=0.7,
        transfer=1.1,
    ),
    "modal": Compared(sdk=Modal, against="Modal's SDK", module="modal", ends="that waits for its end"),
    "runloop": Compared(
        sdk=Runloop, against="Runloop's async SDK", module="runloop_api_client", transfer=1.1
    ),
    "coreweave": Compared(sdk=CoreWeave, against="CoreWeave's SDK", module="cwsandbox", at_once=False),
}
