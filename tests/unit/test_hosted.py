"""What providers behind an SDK have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lowtide import errors
from lowtide.providers import hosted

KNOWN = {"api_key": "SERVICE_KEY", "region": "SERVICE_REGION"}


def test_an_option_counts_before_its_variable_and_an_empty_variable_is_none() -> None:
    environ = {"SERVICE_KEY": "from-environment", "SERVICE_REGION": ""}
    assert hosted.chosen("service", KNOWN, None, environ) == {"api_key": "from-environment", "region": None}
    assert hosted.chosen("service", KNOWN, {"api_key": "given"}, environ)["api_key"] == "given"


@pytest.mark.parametrize("options", [{"colour": "blue"}, {"api_key": 7}, {"api_key": ""}])
def test_a_wrong_option_is_named_and_its_value_is_not_shown(options: dict[str, object]) -> None:
    with pytest.raises(errors.ValidationError) as caught:
        hosted.chosen("service", KNOWN, options, {})
    assert caught.value.argument in options
    assert "blue" not in str(caught.value)


async def test_what_may_be_asked_twice_is_asked_again_while_patience_lasts() -> None:
    service = hosted.Service(
        "service", "Service", [hosted.Fault(errors.SandboxUnavailableError, of="builtins.OSError")]
    )
    tries: list[int] = []

    async def ask() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("dropped")
        return "answer"

    assert await service.again(ask, "ask", patience=60.0) == "answer"
    tries.clear()
    with pytest.raises(errors.SandboxUnavailableError):
        await service.again(ask, "ask", patience=0.0)
    assert len(tries) == 1


def test_an_account_is_the_same_for_the_same_key_and_does_not_show_it() -> None:
    one = hosted.account("service", "https://a", "key-123")
    assert one == hosted.account("service", "https://a", "key-123")
    assert one not in (
        hosted.account("service", "https://b", "key-123"),
        hosted.account("service", "https://a", "key-124"),
        hosted.account("other", "https://a", "key-123"),
    )
    assert "key" not in one


async def test_a_call_that_ignores_being_cancelled_does_not_hold_its_caller() -> None:
    released = asyncio.Event()

    async def deaf() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    call = asyncio.ensure_future(deaf())
    with pytest.raises(errors.RequestTimeoutError, match=r"Service did not answer within 0\.05 s: listen"):
        await hosted.within(0.05, call, "listen", service="Service", provider="service", sandbox_id="s1")
    released.set()
    await call


async def test_a_transport_that_cancels_itself_is_a_lost_connection_and_no_cancellation() -> None:
    call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call.cancel()
    with pytest.raises(ConnectionResetError):
        await hosted.within(5.0, call, "ask", service="Service", provider="service")


def test_what_is_not_the_sdks_passes_and_what_is_becomes_ours_with_its_cause() -> None:
    def translated(
        error: BaseException, sandbox_id: str | None = None, *, path: str | None = None
    ) -> errors.LowtideError | None:
        return errors.SandboxError(f"{path}", sandbox_id=sandbox_id) if isinstance(error, KeyError) else None

    mapped = hosted.mapped_by(translated)
    with pytest.raises(errors.SandboxError, match="/tmp/x") as caught, mapped("s1", path="/tmp/x"):
        raise KeyError("the SDK's")
    assert caught.value.sandbox_id == "s1"
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ZeroDivisionError), mapped("s1"):
        raise ZeroDivisionError
    with pytest.raises(errors.SandboxGone) as gone, mapped("s1"):
        raise errors.SandboxGone("ours already", reason="ended")
    assert gone.value.sandbox_id == "s1"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("open /x: Permission denied", errors.SandboxPermissionError),
        ("'/x' is a directory", errors.SandboxIsADirectoryError),
        ("file does not exist", errors.SandboxFileNotFoundError),
        ("write: no space left on device", errors.ResourceExhaustedError),
    ],
)
def test_the_words_of_a_file_service_become_the_error_people_expect(
    said: str, kind: type[errors.LowtideError]
) -> None:
    assert type(hosted.file_error(said, "/x", {"provider": "service"})) is kind
    assert hosted.file_error("the moon is full", "/x", {}) is None


async def test_counted_chunks_say_what_was_moved_and_what_their_source_raised() -> None:
    async def source() -> AsyncIterator[bytes]:
        yield b"bcd"
        raise OSError("unplugged")

    counted = hosted.Counted(source(), b"a")
    moved = []
    with pytest.raises(OSError, match="unplugged"):
        async for chunk in counted:
            moved.append(chunk)
    assert (moved, counted.bytes, counted.moved) == ([b"a", b"bcd"], 4, 2)
    assert isinstance(counted.error, OSError)


def test_a_key_that_a_service_quotes_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_secrets", set())
    key, password = "e2b_0123456789abcdef", "a-proxys-password"
    hosted.chosen("e2b", {"api_key": "E2B_API_KEY"}, None, {"E2B_API_KEY": key})
    hosted.way_of({"HTTPS_PROXY": f"http://me:{password}@127.0.0.1:1"})
    error = errors.AuthenticationError(f"Invalid API key: {key}; through {password}", provider="e2b")
    assert str(error) == "Invalid API key: ***; through ***"


@pytest.mark.parametrize(
    "key", ["hunter2\n", "hunter2\r\nX-Other: 1", "hunter2\N{LATIN SMALL LETTER E WITH ACUTE}"]
)
def test_a_key_that_cannot_be_sent_is_refused_before_anybody_can_quote_it(key: str) -> None:
    for options, environ, name in (
        ({"api_key": key}, {}, "api_key"),
        (None, {"SERVICE_KEY": key}, "SERVICE_KEY"),
    ):
        with pytest.raises(errors.ValidationError) as caught:
            hosted.chosen("service", KNOWN, options, environ)
        assert name in str(caught.value)
        assert "hunter2" not in str(caught.value)
