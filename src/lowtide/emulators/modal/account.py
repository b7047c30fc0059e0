"""What belongs to the workspace: environments, apps and secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from grpclib import Status
from modal_proto import api_pb2 as pb

from lowtide.emulators.clock import Clock
from lowtide.emulators.modal.model import App, new_id
from lowtide.emulators.modal.refusal import Refused, invalid, not_found

NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DEFAULT_ENVIRONMENT = "main"


class Account:
    def __init__(self) -> None:
        self.environments: dict[str, str] = {DEFAULT_ENVIRONMENT: new_id("en")}
        self.apps: dict[str, App] = {}

    def environment(self, name: str, creation: int = 0) -> str:
        """Its name; the default one where none is said."""
        name = name or DEFAULT_ENVIRONMENT
        if name not in self.environments:
            if creation != pb.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise not_found("Environment", repr(name))
            if not NAME.fullmatch(name):
                raise invalid("deployment_name", "letters, digits, . _ -, at most 63")
            self.environments[name] = new_id("en")
        return name

    def app(self, name: str, environment: str, creation: int = 0) -> App:
        environment = self.environment(environment)
        for app in self.apps.values():
            if (app.name, app.environment) == (name, environment):
                if creation == pb.OBJECT_CREATION_TYPE_CREATE_FAIL_IF_EXISTS:
                    raise Refused(Status.ALREADY_EXISTS, f"App {name!r} exists")
                return app
        if creation == pb.OBJECT_CREATION_TYPE_UNSPECIFIED:
            raise not_found("App", f"{name!r} in environment {environment!r}")
        if not NAME.fullmatch(name):
            raise invalid("app_name", "letters, digits, . _ -, at most 63")
        app = App(app_id=new_id("ap"), name=name, environment=environment)
        self.apps[app.app_id] = app
        return app

    def app_by_id(self, app_id: str) -> App:
        try:
            return self.apps[app_id]
        except KeyError:
            raise not_found("App", app_id) from None


@dataclass(slots=True, kw_only=True)
class Secret:
    secret_id: str
    name: str
    environment: str
    variables: dict[str, str]
    created_at: float


class Secrets:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.table: dict[str, Secret] = {}

    def get(self, secret_id: str) -> Secret:
        try:
            return self.table[secret_id]
        except KeyError:
            raise not_found("Secret", secret_id) from None

    def get_or_create(self, request: Any, environment: str) -> Secret:
        check_variables(request.env_dict, "env_dict")
        creation, name = request.object_creation_type, request.deployment_name
        found = next((s for s in self.table.values() if name and s.name == name), None)
        if found is not None and found.environment == environment:
            if creation == pb.OBJECT_CREATION_TYPE_CREATE_FAIL_IF_EXISTS:
                raise Refused(Status.ALREADY_EXISTS, f"Secret {name!r} exists")
            if creation == pb.OBJECT_CREATION_TYPE_CREATE_OVERWRITE_IF_EXISTS:
                found.variables = dict(request.env_dict)
            missing = [key for key in request.required_keys if key not in found.variables]
            if missing:
                raise Refused(Status.FAILED_PRECONDITION, f"Secret {name!r} has no {', '.join(missing)}")
            return found
        if creation == pb.OBJECT_CREATION_TYPE_UNSPECIFIED:
            raise not_found("Secret", repr(name))
        if name and not NAME.fullmatch(name):
            raise invalid("deployment_name", "letters, digits, . _ -, at most 63")
        made = Secret(
            secret_id=new_id("st"),
            name=name,
            environment=environment,
            variables=dict(request.env_dict),
            created_at=self._clock.now(),
        )
        self.table[made.secret_id] = made
        return made

    def environment(self, ids: Iterable[str], sources: Iterable[Any]) -> dict[str, str]:
        """The variables of all of them, later ones over earlier ones."""
        found: dict[str, str] = {}
        for secret_id in ids:
            found.update(self.get(secret_id).variables)
        for source in sources:
            if source.WhichOneof("source") == "secret_id":
                found.update(self.get(source.secret_id).variables)
            else:
                check_variables(source.env.contents, "secret_sources.env")
                found.update(source.env.contents)
        return found


def check_variables(variables: Iterable[str], field: str) -> None:
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise invalid(field, f"{name[:100]!r} is not the name of a variable")
