"""Where Modal's provider connects to: the environment and the SDK's own file, as the guardian has to see it, too."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from lowtide import Sandbox, errors
from lowtide.providers.modal import ModalOptions, ModalProvider, access
from lowtide.providers.modal.access import Access
from lowtide.providers.modal.errors import SERVICE

TOKEN = {"MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-1"}
FILE = '[one]\nenvironment = "dev"\nserver_url = "http://127.0.0.1:1"\n[two]\nactive = true\nenvironment = "prod"\n'


def resolved(path: Path, **more: str) -> Access:
    return Access.resolve({**TOKEN, "MODAL_CONFIG_PATH": str(path), **more}, None)


def test_the_sdks_own_file_counts_and_the_guardian_is_told_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "modal.toml"
    path.write_text(FILE)
    assert resolved(path).environment == "prod"
    assert resolved(path, MODAL_ENVIRONMENT="own").environment == "own"
    found = resolved(path, MODAL_PROFILE="one")
    assert (found.environment, found.server_url) == ("dev", "http://127.0.0.1:1")
    assert found.account != resolved(path).account
    path.write_text('[one]\nenvironment = "another by now"\n')  # `modal profile activate`, say
    assert Access.resolve(found.credentials(), None).account == found.account
    assert found.credentials()["MODAL_CONFIG_PATH"] == os.devnull


@pytest.mark.parametrize("text", ["", "one = 1", "not toml [", "[two]\nactive = true\nenvironment = 5\n"])
def test_a_file_that_says_nothing_is_no_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "modal.toml"
    path.write_text(text)
    assert resolved(path).environment is None
    assert resolved(tmp_path / "none").environment is None


def test_an_answer_that_cannot_be_read_is_a_fault_of_the_service() -> None:
    message = pytest.importorskip("google.protobuf.message")
    found = SERVICE.translated(message.DecodeError("Error parsing message"))
    assert isinstance(found, errors.SandboxUnavailableError)


@pytest.mark.parametrize(
    "given",
    [
        {"timeout_seconds": "60"},
        {"timeout_seconds": True},
        {"encrypted_ports": 4444},
        {"encrypted_ports": ("4444",)},
        {"idle_timeout_seconds": 1.5},
        {"tags": ["a"]},
        {"region": 5},
    ],
)
@pytest.mark.parametrize("form", [dict, lambda given: ModalOptions(**given)])
def test_an_option_of_a_wrong_type_is_refused_before_anything_is_made(
    given: dict[str, object], form: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(*_: object) -> None:
        raise AssertionError("it was asked for")

    monkeypatch.setattr(ModalProvider, "create", create)
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.ValidationError, match=next(iter(given))) as caught:
        Sandbox.run(provider="modal", provider_options=form(given))  # type: ignore[operator]
    assert caught.value.argument == "provider_options"


async def test_a_server_that_cannot_be_reached_is_given_up_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The SDK alone tries for a minute to connect."""
    pytest.importorskip("modal")
    monkeypatch.setattr(access, "_LOOKUP_SECONDS", 0.2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        provider = ModalProvider.connect({**TOKEN, "MODAL_SERVER_URL": url})
        async with asyncio.timeout(25):
            with pytest.raises(errors.RequestTimeoutError):
                await provider.get("sb-1")
            await provider.aclose()
