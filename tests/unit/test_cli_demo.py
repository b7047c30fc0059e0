"""`lowtide demo`: the tour works without a terminal and leaves nothing."""

from __future__ import annotations

from cli_process import Cli, cli  # noqa: F401 (fixture)


def test_the_tour_tells_its_story_and_leaves_nothing(cli: Cli) -> None:  # noqa: F811
    done = cli("demo", timeout=240)
    text = done.stdout.decode()
    assert done.returncode == 0, text + done.stderr.decode()
    assert "\x1b" not in text
    for chapter in (
        "session of three",
        "streams",
        "Files",
        "snapshot",
        "killed with -9",
        "nothing is left behind",
    ):
        assert chapter in text, text
    assert cli.ids() == []
