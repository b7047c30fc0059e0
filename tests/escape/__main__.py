"""Try everything and say it in one line each: python -m tests.escape [--provider NAME] [--only WORD]."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from benchmarks import state

from tests.escape.attempt import GVISOR, PROVIDERS, Attempt, LeftOut, Target, everything

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.escape", description=__doc__)
    parser.add_argument(
        "--provider", action="append", choices=(*PROVIDERS, GVISOR), help="default: all that are there"
    )
    parser.add_argument("--only", default="", help="attempts with this in their name")
    parser.add_argument("--list", action="store_true", help="say what there is, and try nothing")
    parser.add_argument("--as-user", action="store_true", help="on local, as an ordinary user too")
    arguments = parser.parse_args()
    attempts = [one for one in everything() if arguments.only in one.name]
    if arguments.list:
        for one in attempts:
            print(f"{one.name}: {one.about} ({', '.join(one.providers)})")
        return 0
    out = 0
    home = Path(tempfile.mkdtemp(prefix="escape-", dir="/tmp"))
    os.environ.setdefault("LOWTIDE_HOME", str(home))
    try:
        for provider in arguments.provider or (*PROVIDERS, GVISOR):
            missing = why_not(provider)
            if missing is not None:
                print(f"left out: {provider}: {missing}", flush=True)
                continue
            image = (
                None
                if provider in ("local", GVISOR)
                else os.environ.get("LOWTIDE_TEST_IMAGE", "lowtide-test:latest")
            )
            with Target(provider, image) as target:
                out += sum(say(one, target) for one in attempts if one.applies(provider))
    finally:
        state.end(home)
    if arguments.as_user and os.geteuid() == 0:
        out += as_ordinary_user(arguments.only)
    print(f"{out} got out" if out else "all held", flush=True)
    return 1 if out else 0


def say(one: Attempt, target: Target) -> int:
    who = f"{target.provider}, as {'root' if target.root else 'an ordinary user'}"
    try:
        got = one.work(target)
    except LeftOut as reason:
        print(f"left out: {one.about} ({who}): {reason}", flush=True)
        return 0
    except Exception:
        traceback.print_exc()
        got = "the attempt did not come to its end"
    print(f"GOT OUT: {one.about} ({who}): {got}" if got else f"held: {one.about} ({who})", flush=True)
    return 1 if got else 0


def why_not(provider: str) -> str | None:
    from tests import container_engine, kubernetes_node

    if provider == "docker" and not container_engine.answers(container_engine.DOCKER):
        return "no Docker engine answers"
    if provider == GVISOR and shutil.which("runsc") is None:
        return "runsc is not installed"
    return kubernetes_node.missing() if provider == "kubernetes" else None


def as_ordinary_user(only: str) -> int:
    from tests.ordinary_user import OrdinaryUser, why_not

    missing = why_not()
    if missing is not None:
        print(f"left out: as an ordinary user: {missing}", flush=True)
        return 0
    with OrdinaryUser() as user:
        done = subprocess.run(
            user.command("-m", "tests.escape", "--provider", "local", "--provider", GVISOR, "--only", only),
            cwd=ROOT,
            check=False,
        )
    return min(done.returncode, 1)


if __name__ == "__main__":
    sys.exit(main())
