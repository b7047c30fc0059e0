"""How the service says no: a gRPC status with the details that its clients read (AIP-193)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "cwsandbox.com"
Code = grpc.StatusCode


class Refused(Exception):
    """An answer that is not a success. `reason` is one of the service's CWSANDBOX_* words."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        *,
        metadata: Mapping[str, str] | None = None,
        fields: Sequence[str] = (),
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.fields = code, reason, fields
        self.metadata, self.retry_seconds = dict(metadata or {}), retry_seconds

    async def abort(self, context: Any) -> NoReturn:
        """Answer with it; raises, as grpc does."""
        text = str(self)
        # A header can only hold so much, and a message may quote what was sent.
        text = text.encode("ascii", "replace").decode()[:1000]
        await context.abort(self.code, text, ((("grpc-status-details-bin"), self._details(text)),))
        raise AssertionError("abort raises")

    def _details(self, text: str) -> bytes:
        status = status_pb2.Status(code=self.code.value[0], message=text)
        details: list[Any] = []
        if self.reason:
            metadata = {key: value[:300] for key, value in self.metadata.items()}
            details.append(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=metadata))
        if self.retry_seconds is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(round(self.retry_seconds * 1000))
            details.append(retry)
        if self.fields:
            violations = [
                error_details_pb2.BadRequest.FieldViolation(field=name[:100], description=text)
                for name in self.fields
            ]
            details.append(error_details_pb2.BadRequest(field_violations=violations))
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return bytes(status.SerializeToString())


def invalid(field: str, message: str) -> Refused:
    return Refused(Code.INVALID_ARGUMENT, f"{field}: {message}", "CWSANDBOX_INVALID_REQUEST", fields=(field,))


def not_found(sandbox_id: str) -> Refused:
    return Refused(
        Code.NOT_FOUND,
        f"sandbox {sandbox_id} not found",
        "CWSANDBOX_SANDBOX_NOT_FOUND",
        metadata={"sandbox_id": sandbox_id},
    )


def not_there(feature: str) -> Refused:
    """For what this emulator does not have: docs/emulators.md has the list."""
    return Refused(
        Code.UNIMPLEMENTED, f"{feature}: not implemented by this emulator", "CWSANDBOX_NOT_IMPLEMENTED"
    )
