"""A command as another user where a provider's commands all have the same one: what runs inside, in a local sandbox."""

from __future__ import annotations

from lowtide import Sandbox
from lowtide.integrations.other_user import become

SUDO = """#!/bin/sh
printf "%s " "$@"
"""


def test_who_is_that_user_already_runs_it_at_once_and_others_go_through_sudo_or_say_what_to_do() -> None:
    with Sandbox.run(network="none") as box:
        run = ["printf", "<%s>", "a b", "c'd"]
        for name in ("root", "0"):
            assert box.exec(become(name, run), user="0", check=True).result().stdout == "<a b><c'd>"
        unknown = box.exec(become("nobody-of-that-name", run), user="0").result()
        assert (unknown.returncode, unknown.stdout) == (126, "")
        assert "nobody-of-that-name: there is no such user" in unknown.stderr

        programs = "mkdir /tmp/few && ln -s $(command -v sh id getent cut printf) /tmp/few"
        box.exec(["sh", "-c", programs], check=True).result()
        few = {"PATH": "/tmp/few"}
        refused = box.exec(become("root", run), user="1000", env=few).result()
        assert (refused.returncode, refused.stdout) == (126, "")
        assert "take an image with sudo" in refused.stderr

        box.write_file("/tmp/few/sudo", SUDO).result()
        box.exec(["chmod", "755", "/tmp/few/sudo"], check=True).result()
        secret = {**few, "KEY": "not in an argument list"}
        asked = box.exec(become("root", run), user="1000", env=secret, check=True).result()
        assert asked.stdout == "-n -E -H -u root -- printf <%s> a b c'd "
