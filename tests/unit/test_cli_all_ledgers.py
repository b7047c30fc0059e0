"""`lowtide sweep --all-ledgers`: what a lost ledger left is listed, and ended on a person's yes alone."""

from __future__ import annotations

from pathlib import Path

from cli_process import Cli, cli  # noqa: F401 (fixture)

from lowtide.providers.base import Labels
from lowtide.testing import FaultyService

COMMAND = ("sweep", "--all-ledgers", "--provider", "faulty")


def test_only_what_is_confirmed_is_ended(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    service = FaultyService(tmp_path / "service")
    place = {"LOWTIDE_FAULTY_DIR": str(service.directory)}
    for name in ("first", "second"):
        labels = Labels(lease_id=name, ledger_id="a-lost-ledger", owner="somebody", tags=("job",))
        service.make_foreign(name, labels.as_dict())
    service.make_foreign("not-ours")
    listed = cli(*COMMAND, **place).stdout.decode()
    assert "a-lost-ledger" in listed
    assert "somebody" in listed
    assert "not-ours" not in listed
    assert service.sandboxes() == ["first", "not-ours", "second"]  # nobody was there to say yes
    assert {row["id"] for row in cli.json(*COMMAND, **place)} == {"first", "second"}
    done = cli(*COMMAND, input="n\ny\n", **place)
    assert done.returncode == 0, done.stderr
    assert service.sandboxes() == ["first", "not-ours"]
    cli(*COMMAND, "--dry-run", input="y\n", **place)
    cli(*COMMAND, "--older-than", "1h", input="y\n", **place)
    cli(*COMMAND, "--tag", "another", input="y\n", **place)
    assert service.sandboxes() == ["first", "not-ours"]
