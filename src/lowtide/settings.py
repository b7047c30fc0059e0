"""What the environment says about how lowtide works, read and checked in one place.

A value that cannot be used is refused before the first create, by the variable's name: at `stop()` or at exit it would
be too late to say so.
"""

from __future__ import annotations

import math
import os

from lowtide.errors import ValidationError

END_SECONDS = "LOWTIDE_END_SECONDS"
EXIT_SECONDS = "LOWTIDE_EXIT_SECONDS"
LEASE_SECONDS = "LOWTIDE_LEASE_SECONDS"
CREATE_WINDOW_SECONDS = "LOWTIDE_CREATE_WINDOW_SECONDS"
SIGNALS = "LOWTIDE_SIGNALS"
KEEP = "LOWTIDE_KEEP"

DEFAULTS = {END_SECONDS: 60.0, EXIT_SECONDS: 30.0, LEASE_SECONDS: 300.0}
_DURATIONS = (END_SECONDS, EXIT_SECONDS, LEASE_SECONDS, CREATE_WINDOW_SECONDS)
_OFF, _ON = ("off", "0", "no", "false"), ("on", "1", "yes", "true", "")
_LONGEST = 31_536_000.0  # a year


def check() -> None:
    """Raises ValidationError for the first variable whose value cannot be used."""
    for name in _DURATIONS:
        if name in os.environ:
            seconds(name)
    signals_on()
    keep = os.environ.get(KEEP, "")
    if keep not in ("", "never", "on-failure", "always"):
        raise _refused(KEEP, keep, "never, on-failure or always")


def seconds(name: str, otherwise: float | None = None) -> float:
    """The duration that the variable gives, or the default where it is not set."""
    text = os.environ.get(name)
    if text is None:
        return DEFAULTS[name] if otherwise is None else otherwise
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST:
        raise _refused(name, text, f"a number of seconds above 0, such as {DEFAULTS.get(name, 60.0):g}")
    return value


def seconds_at_exit() -> float:
    """The one deadline for everything that is destroyed at exit. Never raises: at exit it would be too late to correct it."""
    try:
        return seconds(EXIT_SECONDS)
    except ValidationError:
        return DEFAULTS[EXIT_SECONDS]


def signals_on() -> bool:
    """Whether lowtide may install signal handlers."""
    text = os.environ.get(SIGNALS, "")
    if text.lower() not in _OFF + _ON:
        raise _refused(SIGNALS, text, "on or off")
    return text.lower() in _ON


def _refused(name: str, value: str, accepted: str) -> ValidationError:
    return ValidationError(
        f"{name} is set to {value!r}, which lowtide cannot use: it takes {accepted}. Correct the variable, or unset it "
        "for the default",
        argument=name,
    )
