"""How the service says no: a gRPC status, a message, and the details that its clients read."""

from __future__ import annotations

from typing import Any

from google.protobuf import any_pb2
from grpclib import GRPCError, Status
from grpclib.encoding.base import StatusDetailsCodecBase
from modal_proto import api_pb2


class Refused(Exception):
    """An answer that is not a success."""

    def __init__(self, status: Status, message: str, *, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_seconds = status, retry_seconds

    def as_grpc(self) -> GRPCError:
        # A header can only hold so much, and a message may quote what was sent.
        text = str(self).encode("ascii", "replace").decode()[:1000]
        details = None
        if self.retry_seconds is not None:
            details = [api_pb2.RPCRetryPolicy(retry_after_secs=self.retry_seconds)]
        return GRPCError(self.status, text, details)


class Details(StatusDetailsCodecBase):
    """The details of a status, in the service's own message for them."""

    def encode(self, status: Status, message: str | None, details: Any) -> bytes:
        told = api_pb2.RPCStatus(code=status.value, message=message or "")
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            told.details.append(packed)
        return bytes(told.SerializeToString())

    def decode(self, status: Status, message: str | None, data: bytes) -> Any:
        raise NotImplementedError("a server only sends them")


def invalid(field: str, message: str) -> Refused:
    return Refused(Status.INVALID_ARGUMENT, f"{field}: {message}")


def not_found(what: str, name: str) -> Refused:
    return Refused(Status.NOT_FOUND, f"{what} {name} not found")


def not_there(feature: str) -> Refused:
    """For what this emulator does not have: docs/emulators.md has the list."""
    return Refused(Status.UNIMPLEMENTED, f"{feature}: not implemented by this emulator")
