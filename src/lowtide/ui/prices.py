"""Prices: what an hour of a sandbox costs at each provider, as data that users can replace.

The table that ships with lowtide (`prices.json`) holds list prices with their date and source. A file of the same
form, named by ``LOWTIDE_PRICES``, replaces single providers or adds new ones::

    {"currency": "USD", "providers": {"kubernetes": {"vcpu_hour": 0.03, "memory_gib_hour": 0.004,
      "default_size": {"vcpu": 2, "memory_gib": 4}, "as_of": "2026-11", "source": "our cloud contract"}}}

Costs are estimates: the lease does not record the size of a sandbox, so the provider's default size is assumed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lowtide.errors import ValidationError

PRICES = "LOWTIDE_PRICES"
_RATES = ("vcpu_hour", "memory_gib_hour", "disk_gib_hour")
_SIZES = ("vcpu", "memory_gib", "disk_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The list price of one provider, with the size of a sandbox that asks for none."""

    vcpu_hour: float
    memory_gib_hour: float
    disk_gib_hour: float = 0.0
    vcpu: float
    memory_gib: float
    disk_gib: float = 0.0
    as_of: str
    source: str

    @property
    def hour(self) -> float:
        """What one hour of a sandbox of the default size costs."""
        return (
            self.vcpu * self.vcpu_hour
            + self.memory_gib * self.memory_gib_hour
            + self.disk_gib * self.disk_gib_hour
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The price of every provider that has one."""

    currency: str
    providers: Mapping[str, Price]

    def cost(self, provider: str, seconds: float) -> float | None:
        """What that many seconds of a sandbox cost there; None for a provider without a price."""
        price = self.providers.get(provider)
        return None if price is None else price.hour * max(0.0, seconds) / 3600


def load(environ: Mapping[str, str] | None = None) -> Prices:
    """The built-in prices with those of the user's file on top. ValidationError names a mistake in that file."""
    prices = _read(
        json.loads(resources.files("lowtide.ui").joinpath("prices.json").read_text()), "prices.json"
    )
    path = (os.environ if environ is None else environ).get(PRICES)
    if not path:
        return prices
    try:
        document = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ValidationError(f"{PRICES}={path} cannot be read: {error}", argument=PRICES) from error
    own = _read(document, path)
    if own.currency != prices.currency and own.providers.keys() != prices.providers.keys():
        # Two currencies in one sum would be a lie: the built-in prices are dropped.
        return own
    return Prices(currency=own.currency, providers={**prices.providers, **own.providers})


def _read(document: Any, path: str) -> Prices:
    def wrong(what: str) -> ValidationError:
        return ValidationError(f"the price file {path}: {what}", argument=PRICES)

    if not isinstance(document, dict) or not isinstance(document.get("providers"), dict):
        raise wrong('expected an object with "currency" and "providers"')
    currency = document.get("currency", "USD")
    if not isinstance(currency, str) or len(currency) != 3:
        raise wrong("currency must be a three-letter code such as USD")
    found = {}
    for name, entry in document["providers"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("default_size"), dict):
            raise wrong(f'{name}: expected an object with rates and a "default_size"')
        numbers = {rate: entry.get(rate, 0) for rate in _RATES}
        numbers |= {size: entry["default_size"].get(size, 0) for size in _SIZES}
        for key, value in numbers.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or value < 0
            ):
                raise wrong(f"{name}: {key} must be a number that is not negative, not {value!r}")
        found[name] = Price(
            **{key: float(value) for key, value in numbers.items()},
            as_of=str(entry.get("as_of", "")),
            source=str(entry.get("source", "")),
        )
    return Prices(currency=currency, providers=found)
