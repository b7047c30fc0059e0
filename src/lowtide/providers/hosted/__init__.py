"""What hosted services have in common, so that a provider says only what its service is like.

* `chosen`, `chosen_with_key`, `way_of`, `account`: options, then the environment; the way there; a stable name for the account
* `Service`, `Fault`: every call of the SDK has an outer deadline, and its errors are told by a table
* `recovered`: a create whose answer was lost or is wrong: look for what it made, ask again where that is safe
* `until_ready`: wait until a sandbox can be used, or say why it never will
* `delete`: a delete counts when the sandbox is not found any more; its states are `End`
* `pages`: of a list, which ends
* `explained`: what an error on the way into a sandbox means: the control plane knows
* `options_of`, `labels_of`, `only_ipv4`, `asked_for`: what a create may be asked for
* `backoff`: the delays of whoever asks again
* `Hosted`, `INSIDE`: what their providers have in common beyond the calls of the program inside
* `grpc`, `forked_grpc`: requests and streams over gRPC, which does not survive a fork

A provider's ``errors.py`` is a table and one service::

    FAULTS = (
        Fault(errors.AuthenticationError, of="acme.Unauthorized", words="{text}: set ACME_API_KEY"),
        Fault(errors.SandboxNotFoundError, status=404, words="no sandbox {sandbox_id}"),
        Fault(errors.SandboxUnavailableError, status=range(500, 600)),
        Fault(errors.RequestTimeoutError, of=("builtins.TimeoutError", "httpx.TimeoutException")),
    )
    SERVICE = Service("acme", "Acme", FAULTS)

and its calls read so::

    made = await SERVICE.call(30.0, sdk.create(...), "create")
    info = await recovered(make, find, read, service=SERVICE, labels=spec.labels, seconds=45.0, replay=True)
    info = await until_ready(look, service=SERVICE, sandbox_id=sandbox_id, seconds=60.0)
    return await delete(ask, look, service=SERVICE, sandbox_id=sandbox_id)

``make``, ``find``, ``read``, ``ask`` and ``look`` are the provider's own small functions. They raise lowtide's errors
only, which `Service.call` sees to.
"""

from __future__ import annotations

from lowtide.backoff import backoff
from lowtide.providers.hosted.access import (
    account,
    chosen,
    chosen_with_key,
    credentials_of,
    inside_key,
    is_id,
    is_word,
    missing_dependency,
    needs_key,
    needs_sdk,
    url_of,
    way_of,
)
from lowtide.providers.hosted.create import (
    asked_for,
    is_of_lease,
    labels_of,
    only_ipv4,
    options_of,
    recovered,
)
from lowtide.providers.hosted.destroy import End, delete
from lowtide.providers.hosted.errors import Fault, file_error, is_own, status_of, was_raised_from
from lowtide.providers.hosted.lookup import explained, pages, until_ready
from lowtide.providers.hosted.provider import INSIDE, Hosted
from lowtide.providers.hosted.service import Service, mapped_by, was_lost, within
from lowtide.providers.hosted.transfer import Counted

__all__ = [
    "INSIDE",
    "Counted",
    "End",
    "Fault",
    "Hosted",
    "Service",
    "account",
    "asked_for",
    "backoff",
    "chosen",
    "chosen_with_key",
    "credentials_of",
    "delete",
    "explained",
    "file_error",
    "inside_key",
    "is_id",
    "is_of_lease",
    "is_own",
    "is_word",
    "labels_of",
    "mapped_by",
    "missing_dependency",
    "needs_key",
    "needs_sdk",
    "only_ipv4",
    "options_of",
    "pages",
    "recovered",
    "status_of",
    "until_ready",
    "url_of",
    "was_lost",
    "was_raised_from",
    "way_of",
    "within",
]
