"""Every keyword is checked by name before anything is created, and comes from one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowtide import (
    Keep,
    Limits,
    Network,
    Sandbox,
    SandboxDefaults,
    Session,
    UnsupportedError,
    ValidationError,
)
from lowtide.defaults import default_provider, resolve, settings
from lowtide.providers import registry
from lowtide.providers.base import NetworkMode
from lowtide.providers.inside import program
from lowtide.testing import FaultyService


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("tags", "one-string"),
        ("tags", ["bad tag"]),
        ("tags", ["ends-badly-"]),
        ("tags", ["x" * 60]),
        ("tags", ["twice", "twice"]),
        ("tags", [1]),
        ("working_dir", "relative"),
        ("working_dir", "/nul\0"),
        ("container_image", 3),
        ("container_image", ""),
        ("command", []),
        ("command", ["a", 1]),
        ("command", "nul\0"),
        ("environment_variables", ["A=1"]),
        ("environment_variables", {"1A": "x"}),
        ("environment_variables", {"A=B": "x"}),
        ("environment_variables", {"A": 1}),
        ("environment_variables", {"A": "nul\0"}),
        ("environment_variables", {"LOWTIDE_KEY": "x"}),
        ("environment_variables", {"LOWTIDE_FIRST": "x"}),
        ("resources", "256Mi"),
        ("resources", {"limits": {"memory": "lots"}}),
        ("resources", {"limits": {"memory": "-1Gi"}}),
        ("resources", {"limits": {"cpu": "1Gi"}}),
        ("resources", {"limits": {"pids": "many"}}),
        ("resources", {"limits": {"colour": 1}}),
        ("resources", {"limits": {"memory": "1Gi"}, "size": 3}),
        ("network", "some"),
        ("network", {"allow": "example.org"}),
        ("network", {"deny_ingress": True}),
        ("ports", "8080"),
        ("ports", [0]),
        ("ports", [8080, 8080]),
        ("max_lifetime_seconds", 0),
        ("max_lifetime_seconds", "10"),
        ("max_lifetime_seconds", float("nan")),
        ("keep", "sometimes"),
        ("keep_for_seconds", -1),
        ("snapshot", 5),
        ("provider", "nowhere"),
        ("provider", 5),
        ("containre_image", "x"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_everywhere_and_no_provider_is_asked(
    argument: str, value: Any, tmp_path: Path
) -> None:
    given = {"provider": "faulty", argument: value}
    with FaultyService(tmp_path) as service:
        service.fault("create", refuse=True)
        for make in (Sandbox, Sandbox.run, SandboxDefaults.from_dict, Session, Session().sandbox):
            with pytest.raises(ValidationError) as caught:
                make(given) if make == SandboxDefaults.from_dict else make(**given)
            assert caught.value.argument == argument
            assert str(caught.value)
        assert service.pending() == ["create"]  # the first call of it would have struck


def test_an_unknown_keyword_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ValidationError, match="did you mean 'container_image'"):
        Sandbox.run(containre_image="x")  # type: ignore[call-arg]


def test_an_unknown_provider_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="local") as caught:
        Sandbox.run(provider="nowhere")
    assert caught.value.argument == "provider"


def test_requests_and_gpus_are_refused_and_not_ignored() -> None:
    with pytest.raises(UnsupportedError) as caught:
        SandboxDefaults(resources={"requests": {"cpu": 1}})
    assert caught.value.alternative == "limits"


def test_what_the_provider_cannot_do_is_refused_with_the_alternative() -> None:
    with pytest.raises(UnsupportedError) as caught:
        Sandbox(provider="faulty", snapshot="snap")
    error = caught.value
    assert (error.provider, error.feature, error.argument) == ("faulty", "snapshot", "snapshot")
    assert error.alternative


def test_quantities_are_understood() -> None:
    asked = {"limits": {"cpu": "500m", "memory": "256Mi", "pids": 64, "disk": "1Gi"}}
    assert SandboxDefaults(resources=asked).resources == Limits(
        cpu=0.5, memory_bytes=256 << 20, pids=64, disk_bytes=1 << 30
    )
    assert SandboxDefaults(resources={"cpu": 2, "memory": "10M"}).resources == Limits(
        cpu=2.0, memory_bytes=10_000_000
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("none", Network(mode=NetworkMode.NONE)),
        ("internet", Network(mode=NetworkMode.INTERNET)),
        ("full", Network(mode=NetworkMode.INTERNET)),
        ("host", Network(mode=NetworkMode.HOST)),
        ({"allow": ["example.org"]}, Network(mode=NetworkMode.ALLOW, allow=("example.org",))),
        ({"allow": []}, Network(mode=NetworkMode.NONE)),
        ({"deny_egress": True}, Network(mode=NetworkMode.NONE)),
        ({"egress": [{"cidr": "10.0.0.0/8"}]}, Network(mode=NetworkMode.ALLOW, allow=("10.0.0.0/8",))),
        ({"egress": [{"any": True}]}, Network(mode=NetworkMode.INTERNET)),
    ],
)
def test_network_is_understood(given: Any, meant: Network) -> None:
    assert SandboxDefaults(network=given).network == meant


def test_tags_and_environment_are_added_to_and_the_rest_is_replaced() -> None:
    base = SandboxDefaults(tags=("a",), environment_variables={"X": "1", "Y": "1"}, command="sh", args=["-c"])
    merged = base.merged({"tags": ["b", "a"], "environment_variables": {"Y": "2"}, "working_dir": "/w"})
    assert merged.tags == ("a", "b")
    assert merged.environment_variables == {"X": "1", "Y": "2"}
    assert (merged.working_dir, merged.argv) == ("/w", ("sh", "-c"))
    assert base.merged({"command": "python"}).argv == ("python",)
    assert base.with_overrides(tags=["only"]).tags == ("only",)


def test_a_value_comes_from_argument_then_environment_then_file_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_HOME", str(tmp_path))

    def told() -> dict[str, tuple[Any, str]]:
        return {setting.key: (setting.value, setting.source) for setting in settings()}

    assert told()["keep"] == ("never", "default")
    config = tmp_path / "config.toml"
    config.write_text('keep = "always"\ncontainer_image = "python:3.11"\ntags = ["from-file"]\n')
    assert told()["keep"] == (Keep.ALWAYS, str(config))
    assert told()["container_image"] == ("python:3.11", str(config))
    monkeypatch.setenv("LOWTIDE_KEEP", "on-failure")
    assert told()["keep"] == (Keep.ON_FAILURE, "LOWTIDE_KEEP")
    assert resolve(None, {}).keep is Keep.ON_FAILURE
    assert resolve({"keep": "always"}, {}).keep is Keep.ALWAYS
    held = resolve({"keep": "always"}, {"keep": "never", "tags": ["more"]})
    assert (held.keep, held.tags) == (Keep.NEVER, ("from-file", "more"))


def test_where_nobody_names_a_provider_the_file_and_then_the_environment_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_HOME", str(tmp_path))
    monkeypatch.delenv("LOWTIDE_PROVIDER", raising=False)
    (tmp_path / "config.toml").write_text('provider = "faulty"\n')
    assert default_provider() == "faulty"
    monkeypatch.setenv("LOWTIDE_PROVIDER", "local")
    assert default_provider() == "local"


def test_a_mistake_in_the_file_names_the_file_and_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('colour = "blue"\n')
    with pytest.raises(ValidationError, match=r"config\.toml.*colour") as caught:
        Sandbox()
    assert caught.value.argument == "colour"


@pytest.mark.parametrize("provider", registry.known())
@pytest.mark.parametrize("name", [program.KEY, program.FIRST])
def test_variables_that_the_program_inside_takes_are_refused_on_every_provider(
    provider: str, name: str
) -> None:
    """Before the provider is connected: no account is needed to hear it."""
    with pytest.raises(ValidationError, match=f"environment_variables must not have {name}"):
        Sandbox.run(provider=provider, environment_variables={name: "x"})
    with pytest.raises(ValidationError, match=name):
        SandboxDefaults(provider=provider).with_overrides(environment_variables={name: "x"})
