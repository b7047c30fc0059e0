"""One create call: the pod, with the program and the key in a secret beside it, and its network policy."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from lowtide import logger
from lowtide.errors import AuthenticationError, SandboxFailedError
from lowtide.providers.base import SandboxSpec
from lowtide.providers.inside import program
from lowtide.providers.kubernetes import destroy, status
from lowtide.providers.kubernetes import pod as objects
from lowtide.providers.kubernetes.client import Api
from lowtide.providers.kubernetes.errors import SERVICE, ApiError, may_not
from lowtide.providers.kubernetes.pod import Json

log = logger.get("lowtide.kubernetes")

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_PODS, _SECRETS, _POLICIES = "pods", "secrets", "networking.k8s.io/networkpolicies"
_RIGHTS = {
    _PODS: ("create", "get", "delete"),
    _SECRETS: ("create", "get", "patch", "delete"),
    _POLICIES: ("create", "get", "patch", "delete"),
}
"""Without one of these something would stay. All others are refused by the server when they are needed."""


class Creation:
    """What stands beside the pod is made before it, so that nothing ever runs without it, and given to it as its
    owner right after. Dying in between leaves what `find`, `get` and `list` show and `destroy` takes away."""

    def __init__(self, api: Api, spec: SandboxSpec, namespace: str, image: str, architecture: str) -> None:
        self._api, self._spec, self._namespace = api, spec, namespace
        self._image, self._architecture = image, architecture
        self._name = objects.pod_name(spec.lease_id)
        self.key = program.new_key()

    async def check_rights(self) -> None:
        """Refuse by name where something could be created here that could not be removed again. A server that does not say
        what is allowed is left to refuse."""
        for resource, needed in _RIGHTS.items():
            if resource == _POLICIES and not objects.wants_policy(self._spec):
                continue
            allowed = dict(
                zip(needed, await asyncio.gather(*(self._may(resource, v) for v in needed)), strict=True)
            )
            if resource == _SECRETS and not allowed["create"]:
                continue  # then there is none: the key stands in the pod
            if missing := [verb for verb, may in allowed.items() if not may]:
                words = (
                    f"these credentials may not {' or '.join(missing)} {resource} in the namespace {self._namespace}, so lowtide "
                    "creates nothing there: it could not run the sandbox or not remove it. The rights lowtide needs are in "
                    "docs/kubernetes.md"
                )
                raise SERVICE.error(AuthenticationError, words)

    async def _may(self, resource: str, verb: str) -> bool:
        group, _, name = resource.rpartition("/")
        asked = {"namespace": self._namespace, "verb": verb, "group": group, "resource": name}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        try:
            answer = await self._api.request("POST", _REVIEWS, body=body)
        except ApiError:
            return True
        return (answer.get("status") or {}).get("allowed") is not False

    async def run(self) -> Json:
        spec, namespace = self._spec, self._namespace
        beside = []
        try:
            if secret := await self._secret():
                beside.append(objects.secrets)
            if objects.wants_policy(spec):
                beside.append(objects.policies)
                await self._create_or_get(objects.policies(namespace), objects.policy(spec))
            body = objects.pod(
                spec,
                default_image=self._image,
                architecture=self._architecture,
                key=None if secret else self.key,
            )
            pod = await self._create_or_get(objects.pods(namespace), body)
        except ApiError as error:
            if error.status < 500:  # else the pod may still come, and then needs what stands beside it
                await self._take_back()
            raise
        if any(pod["metadata"].get("labels", {}).get(k) != v for k, v in spec.labels.as_dict().items()):
            if not status.is_ours(pod):
                await destroy.delete_beside(self._api, namespace, self._name)
            raise self._taken(f"a pod named {self._name} exists that is not this sandbox")
        self.key = objects.key_in_pod(pod) or self.key  # of an earlier try
        owner = objects.owned_by(pod)
        paths = [f"{path(namespace)}/{self._name}" for path in beside]
        await asyncio.gather(*(self._api.request("PATCH", path, body=owner, merge=True) for path in paths))
        return pod

    async def _secret(self) -> bool:
        """Whether there is one: False where the right to make it is missing."""
        body = objects.secret(self._spec, architecture=self._architecture, key=self.key)
        try:
            made = await self._create_or_get(objects.secrets(self._namespace), body)
        except ApiError as error:
            if not may_not(error):
                raise
            log.info("without the right to create secrets in %s the key stands in the pod", self._namespace)
            return False
        if not status.is_ours(made):
            raise self._taken(f"a secret named {self._name} exists that is not lowtide's")
        self.key = objects.key_in_secret(made) or self.key
        return True

    def _taken(self, words: str) -> SandboxFailedError:
        return SERVICE.error(SandboxFailedError, words, reason="AlreadyExists")

    async def _create_or_get(self, path: str, body: Json) -> Json:
        try:
            return await self._api.request("POST", path, body=body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            return await self._api.request("GET", f"{path}/{self._name}")

    async def _take_back(self) -> None:
        """Best effort: the caller has an error to see, and what is left can be found again."""
        with suppress(Exception):
            if await self._api.get(f"{objects.pods(self._namespace)}/{self._name}") is None:
                await destroy.delete_beside(self._api, self._namespace, self._name)
