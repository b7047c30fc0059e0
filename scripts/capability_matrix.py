"""Writes docs/capabilities.md from what the providers declare. `--check` only says whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from lowtide.providers import registry
from lowtide.providers.base import Capability

PAGE = Path(__file__).parent.parent / "docs" / "capabilities.md"

MEANING = {
    Capability.IMAGE: "`container_image` names what it runs on",
    Capability.COMMAND: "a main process of your choice",
    Capability.LOGS: "its log (`stream_logs`)",
    Capability.STDIN: "standard input for commands",
    Capability.TTY: "a terminal, with resize",
    Capability.USER: "commands as another user",
    Capability.SIGNALS: "signals to a running command",
    Capability.CPU_LIMIT: "limit on processors",
    Capability.MEMORY_LIMIT: "limit on memory",
    Capability.PIDS_LIMIT: "limit on processes",
    Capability.DISK_LIMIT: "limit on disk",
    Capability.NETWORK_NONE: '`network="none"`',
    Capability.NETWORK_INTERNET: '`network="internet"` ([what it holds back](network.md#what-each-provider-holds-back))',
    Capability.NETWORK_HOST: '`network="host"`',
    Capability.NETWORK_ALLOW: "an allow-list of hosts",
    Capability.NETWORK_PORTS: "an allow-list with ports",
    Capability.DENIED_CONNECTIONS: "`denied_connections()`",
    Capability.GVISOR: '`isolation="gvisor"`, where its runtime is installed',
    Capability.PORTS: "`url(port)`",
    Capability.SNAPSHOT: "snapshots",
    Capability.PAUSE: "pause and resume",
    Capability.LIFETIME: "a lifetime that holds when every lowtide process is gone",
    Capability.RENEW: "that lifetime can be moved",
    Capability.CODE: "an interpreter of its own for `run_code`, which works everywhere",
}


def page() -> str:
    names = [name for name in registry.known() if _exists(name)]
    declared = {name: registry.provider_class(name).capabilities for name in names}
    lines = [
        "# What each provider can do",
        "",
        "Made from the code by `scripts/capability_matrix.py`; a test holds it current. What a provider cannot do is",
        "refused with an `UnsupportedError` before anything is created.",
        "",
        "| | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for capability in Capability:
        cells = ("yes" if capability in declared[name] else "–" for name in names)
        lines.append(f"| {MEANING[capability]} | " + " | ".join(cells) + " |")
    lines += ["", "| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    traits = {name: registry.provider_class(name).traits for name in names}
    rows = {
        "a lost create is found": [traits[n].recovery.value for n in names],
        "within (seconds)": [f"{traits[n].create_window_seconds:g}" for n in names],
        "survives a power cut of this machine": [
            "yes" if traits[n].outlives_machine else "no" for n in names
        ],
    }
    lines += [f"| {what} | " + " | ".join(cells) + " |" for what, cells in rows.items()]
    return "\n".join(lines) + "\n"


def _exists(name: str) -> bool:
    try:
        registry.provider_class(name)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text() == text
        print(
            "current" if current else "docs/capabilities.md is not current: run scripts/capability_matrix.py"
        )
        sys.exit(not current)
    PAGE.write_text(text)
