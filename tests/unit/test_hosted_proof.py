"""What proves that a sandbox is gone: its own service's word, asked with its own account. Nobody else's."""

from __future__ import annotations

import pytest

from lowtide.providers.daytona import DaytonaProvider


def test_a_daytona_key_of_another_organisation_is_another_account_whatever_the_environment_says() -> None:
    pytest.importorskip("daytona")
    said = {"DAYTONA_ORGANIZATION_ID": "one"}  # Daytona hears of it with a token only: a key has its own

    def account(**more: str) -> str:
        return DaytonaProvider.connect({**said, **more}).account

    assert account(DAYTONA_API_KEY="first") != account(DAYTONA_API_KEY="second")
    assert account(DAYTONA_JWT_TOKEN="first") == account(DAYTONA_JWT_TOKEN="second")
