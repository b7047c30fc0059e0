"""Events: where actions and observations go as they happen, and the transcript they can be replayed from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.actionserver import VERSION
from lowtide.actionserver.models import Action, Observation
from lowtide.errors import ValidationError

Sink = Callable[[Any], Any]


def sink(event_stream: Any) -> Sink | None:
    """Whatever takes events: a callable, or an object with `add_event`."""
    if event_stream is None:
        return None
    add = getattr(event_stream, "add_event", None)
    if callable(add):
        return add  # type: ignore[no-any-return]
    if callable(event_stream):
        return event_stream  # type: ignore[no-any-return]
    raise ValidationError(
        f"event_stream must be callable or have add_event, not {type(event_stream).__name__}",
        argument="event_stream",
    )


class Transcript:
    """One JSON object for each action and observation, in one file that only its user reads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._number = 0

    def add(self, event: Action | Observation, cause: int | None = None) -> int:
        self._number += 1
        line = {
            "version": VERSION,
            "id": self._number,
            "time": time.time(),
            "cause": cause,
            "kind": "action" if isinstance(event, Action) else "observation",
            "event": event.to_json(),
        }
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return self._number


class Step(NamedTuple):
    """One action of a transcript and what came of it then; None when it never came back."""

    action: Action
    observation: Observation | None


def read_transcript(path: str | os.PathLike[str]) -> Iterator[Step]:
    """The steps in the order they were begun."""
    actions: dict[int, Action] = {}
    came: dict[int, Observation] = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            if entry["kind"] == "action":
                actions[entry["id"]] = Action.from_json(entry["event"])
            else:
                came[entry["cause"]] = Observation.from_json(entry["event"])
    for number, action in actions.items():
        yield Step(action, came.get(number))
