"""Creates whose answers are lost, waits and confirmed deletes, as hosted services share them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest

from lowtide import errors
from lowtide.backoff import backoff
from lowtide.providers import hosted
from lowtide.providers.base import Labels, SandboxInfo, SandboxState
from lowtide.providers.hosted import End, Fault

SERVICE = hosted.Service(
    "acme",
    "Acme",
    (
        Fault(errors.AuthenticationError, of="tests.Unauthorized", words="{text}: set ACME_KEY"),
        Fault(errors.RateLimitError, status=429),
        Fault(errors.SandboxGone, of="builtins.RuntimeError", says="end of life", more={"reason": "ended"}),
        Fault(errors.SandboxFileError, on_path=True, of="builtins.RuntimeError", words="{path}: {text}"),
        Fault(errors.SandboxNotFoundError, status=(404, 410), words="no sandbox {sandbox_id}"),
        Fault(errors.SandboxUnavailableError, status=range(500, 600)),
        Fault(errors.RequestTimeoutError, of="builtins.TimeoutError", words="Acme did not answer: {type}"),
    ),
)


class Unauthorized(Exception):
    pass


Unauthorized.__module__ = "tests.somewhere"


class Answered(Exception):
    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"answer {status} with {{braces}}")
        self.status_code, self.headers = status, {name.replace("_", "-"): headers[name] for name in headers}


def told(error: BaseException, path: str | None = None) -> errors.LowtideError | None:
    return SERVICE.translated(error, "s1", path=path)


def test_the_first_row_of_the_table_that_fits_says_what_an_error_is() -> None:
    found = told(Unauthorized("no"))
    assert isinstance(found, errors.AuthenticationError)
    assert str(found) == "no: set ACME_KEY"
    assert (found.provider, found.sandbox_id) == ("acme", "s1")
    assert isinstance(told(RuntimeError("End of life")), errors.SandboxGone)
    assert isinstance(told(TimeoutError()), errors.RequestTimeoutError)
    assert str(told(Answered(410))) == "no sandbox s1"
    assert str(told(Answered(503))) == "answer 503 with {braces}"
    assert told(ZeroDivisionError()) is None


def test_a_rate_limit_says_how_long_and_a_status_may_be_in_the_text_or_the_cause() -> None:
    limited = told(Answered(429, Retry_After="7"))
    assert isinstance(limited, errors.RateLimitError)
    assert limited.retry_after_seconds == 7.0
    assert isinstance(told(ValueError("502: bad gateway")), errors.SandboxUnavailableError)
    wrapped = ValueError("it did not work")
    wrapped.__cause__ = Answered(500)
    assert isinstance(told(wrapped), errors.SandboxUnavailableError)


def test_an_error_about_a_file_is_the_one_people_expect_or_names_the_file() -> None:
    missing = told(RuntimeError("no such file or directory"), "/tmp/x")
    assert isinstance(missing, FileNotFoundError)
    odd = told(RuntimeError("strange"), "/tmp/x")
    assert isinstance(odd, errors.SandboxFileError)
    assert str(odd) == "/tmp/x: strange"
    assert told(RuntimeError("strange")) is None


async def test_a_call_is_bounded_and_its_error_told_with_its_cause() -> None:
    async def refuse() -> None:
        raise Answered(404)

    with pytest.raises(errors.SandboxNotFoundError) as caught:
        await SERVICE.call(5.0, refuse(), "get", "s1")
    assert isinstance(caught.value.__cause__, Answered)


def test_delays_grow_to_their_bound() -> None:
    assert list(islice(backoff(0.1, 0.5), 5)) == [0.1, 0.2, 0.4, 0.5, 0.5]


# -- create


LABELS = Labels(lease_id="lease", ledger_id="ledger", owner="owner")


def info(state: SandboxState = SandboxState.RUNNING, reason: str | None = None) -> SandboxInfo:
    return SandboxInfo(sandbox_id="s1", state=state, labels=LABELS.as_dict(), reason=reason)


class Create:
    """A service whose answers to create are given; `made` counts what it really made."""

    def __init__(self, *answers: SandboxInfo | errors.LowtideError, found: SandboxInfo | None = None) -> None:
        self._answers, self.found = list(answers), found
        self.sent = self.looks = self.reads = 0

    async def read(self, sandbox_id: str) -> SandboxInfo:
        self.reads += 1
        return info()

    async def make(self, seconds: float) -> SandboxInfo:
        self.sent += 1
        answer = self._answers.pop(0)
        if isinstance(answer, errors.LowtideError):
            raise answer
        return answer

    async def find(self) -> SandboxInfo | None:
        self.looks += 1
        return self.found

    async def run(self, **more: bool) -> SandboxInfo:
        return await hosted.recovered(
            self.make, self.find, self.read, service=SERVICE, labels=LABELS, seconds=60.0, **more
        )


LOST = errors.SandboxUnavailableError("connection reset")


async def test_a_create_whose_answer_was_lost_is_looked_for_and_not_sent_again() -> None:
    create = Create(LOST, found=info())
    assert (await create.run(replay=True)).sandbox_id == "s1"
    assert (create.sent, create.looks) == (1, 1)


async def test_a_create_that_made_nothing_is_sent_again_only_under_its_key() -> None:
    keyed = Create(LOST, info())
    await keyed.run(replay=True)
    assert (keyed.sent, keyed.looks) == (2, 1)
    plain = Create(LOST)
    with pytest.raises(errors.SandboxUnavailableError, match="connection reset"):
        await plain.run()
    assert (plain.sent, plain.looks) == (1, 1)


@pytest.mark.parametrize(
    "refusal", [errors.ValidationError("no such template"), errors.RateLimitError("slow")]
)
async def test_a_create_that_was_refused_is_not_looked_for(refusal: errors.LowtideError) -> None:
    create = Create(refusal)
    with pytest.raises(type(refusal)):
        await create.run(replay=True)
    assert (create.sent, create.looks) == (1, 0)


@pytest.mark.parametrize(
    ("answer", "reads", "looks"),
    [
        (info(), 0, 0),
        (replace(info(), labels={}), 1, 0),
        (replace(info(), labels={**LABELS.as_dict(), "lowtide-lease": "another"}), 0, 1),
        (replace(info(), labels={**LABELS.as_dict(), "lowtide-ledger": "another"}), 0, 1),
        (replace(info(), sandbox_id="s1/../s2"), 0, 1),
        (replace(info(), sandbox_id=""), 0, 1),
    ],
    ids=["honest", "no labels", "another lease", "another ledger", "a path", "no id"],
)
async def test_the_answer_to_a_create_is_believed_by_its_labels_alone(
    answer: SandboxInfo, reads: int, looks: int
) -> None:
    create = Create(answer, found=info())
    assert await create.run() == info()
    assert (create.sent, create.reads, create.looks) == (1, reads, looks)


@pytest.mark.parametrize("raised", [KeyError("id"), ValueError("no JSON"), Exception("Body is None")])
async def test_an_answer_that_cannot_be_read_is_lost(raised: Exception) -> None:
    create = Create()

    async def unreadable(seconds: float) -> SandboxInfo:
        raise raised

    create.make = unreadable  # type: ignore[method-assign]
    with pytest.raises(errors.SandboxUnavailableError, match="Acme") as caught:
        await create.run()
    assert caught.value.__cause__ is raised
    assert create.looks == 1


@pytest.mark.parametrize(
    ("message", "proof"),
    [
        ("sandbox 'i4k2-9a01bc' not found", True),
        ("sandbox not found", True),
        ("sandbox i4k2 not found", True),
        ("sandbox 'j7d3-9a01bc' not found", False),
        ("Sandbox with ID 0f5e1c1a-6f0e-4b5e-9d5e-2f0f0e7b1a11 not found", False),
        ("not found", False),
    ],
)
def test_a_not_found_is_proof_only_of_the_sandbox_that_it_names(message: str, proof: bool) -> None:
    assert hosted.is_own({"message": message}, "sandbox", "i4k2-9a01bc") is proof


async def test_a_create_whose_look_up_fails_too_says_why_the_create_failed() -> None:
    create = Create(LOST)

    async def broken() -> SandboxInfo | None:
        raise errors.RequestTimeoutError("the look-up")

    create.find = broken  # type: ignore[method-assign]
    with pytest.raises(errors.SandboxUnavailableError, match="connection reset"):
        await create.run(replay=True)


# -- waiting


def looks(*states: SandboxInfo | errors.LowtideError) -> Callable[[], Awaitable[SandboxInfo]]:
    left = iter(states)

    async def look() -> SandboxInfo:
        found = next(left)
        if isinstance(found, errors.LowtideError):
            raise found
        return found

    return look


async def ready(*states: SandboxInfo | errors.LowtideError) -> SandboxInfo:
    return await hosted.until_ready(looks(*states), service=SERVICE, sandbox_id="s1", seconds=30.0)


async def test_ready_is_what_is_not_pending_any_more() -> None:
    assert (await ready(info(SandboxState.PENDING), info())).state is SandboxState.RUNNING
    assert (await ready(info(SandboxState.PAUSED))).state is SandboxState.PAUSED


async def test_one_that_will_never_be_ready_says_why() -> None:
    with pytest.raises(errors.SandboxFailedError, match="no image"):
        await ready(info(SandboxState.PENDING), info(SandboxState.FAILED, "no image"))
    with pytest.raises(errors.SandboxGone):
        await ready(info(SandboxState.ENDING))
    with pytest.raises(errors.SandboxGone):
        await ready(info(SandboxState.PENDING), errors.SandboxNotFoundError("404"))
    with pytest.raises(errors.SandboxFailedError, match="not ready after 0 s"):
        await hosted.until_ready(
            looks(*[info(SandboxState.PENDING)] * 5), service=SERVICE, sandbox_id="s1", seconds=0
        )


@pytest.mark.parametrize(
    ("now", "becomes"),
    [
        (errors.SandboxNotFoundError("404"), errors.SandboxGone),
        (info(SandboxState.ENDING), errors.SandboxGone),
        (info(SandboxState.FAILED), errors.SandboxGone),
        (info(SandboxState.PAUSED), errors.SandboxUnavailableError),
        (info(), errors.SandboxUnavailableError),
        (errors.RequestTimeoutError("no answer"), errors.SandboxUnavailableError),
    ],
)
async def test_the_control_plane_says_what_a_broken_way_into_a_sandbox_means(
    now: SandboxInfo | errors.LowtideError, becomes: type[errors.LowtideError]
) -> None:
    meant = await hosted.explained(LOST, looks(now), service=SERVICE, sandbox_id="s1")
    assert type(meant) is becomes
    if isinstance(now, SandboxInfo) and now.state is SandboxState.PAUSED:
        assert not meant.retryable
        assert "resume()" in str(meant)


async def test_what_is_clear_is_not_asked_about() -> None:
    clear = errors.SandboxFileError("x", path="/x")
    assert await hosted.explained(clear, looks(), service=SERVICE, sandbox_id="s1") is clear


# -- delete


class Delete:
    """A service that answers as told, and notes what it was asked."""

    def __init__(
        self, asks: Iterable[End | errors.LowtideError], looks: Iterable[End | errors.LowtideError] = ()
    ) -> None:
        self._asks, self._looks = iter(asks), iter(looks)
        self.story: list[str] = []

    async def ask(self) -> End:
        return self._next("ask", self._asks)

    async def look(self) -> End:
        return self._next("look", self._looks)

    def _next(self, what: str, answers: Iterator[End | errors.LowtideError]) -> End:
        self.story.append(what)
        answer = next(answers)
        if isinstance(answer, errors.LowtideError):
            raise answer
        return answer

    async def run(self, **bounds: float) -> bool:
        return await hosted.delete(self.ask, self.look, service=SERVICE, sandbox_id="s1", **bounds)  # type: ignore[arg-type]


async def test_an_acknowledged_delete_counts_when_the_sandbox_is_not_found_any_more() -> None:
    once = Delete([End.ACCEPTED], [End.GONE])
    assert await once.run() is True
    assert once.story == ["ask", "look"]
    slow = Delete([End.ENDING], [End.ENDING, End.GONE])
    assert await slow.run() is True
    assert slow.story == ["ask", "look", "look"]


async def test_one_that_was_not_there_is_not_ended_now() -> None:
    gone = Delete([End.MISSING])
    assert await gone.run() is False
    assert gone.story == ["ask"]
    at_once = Delete([End.GONE])
    assert await at_once.run() is True


async def test_an_acknowledged_delete_that_did_not_happen_is_asked_for_again() -> None:
    began = time.monotonic()
    deaf = Delete([End.ACCEPTED] * 20, [End.THERE] * 99)
    with pytest.raises(errors.SandboxUnavailableError, match="acknowledged the end of s1, but it is there"):
        await deaf.run(confirm_seconds=1.5)
    assert time.monotonic() - began >= 1.5
    assert deaf.story.count("ask") > 1


async def test_a_delete_while_another_change_is_under_way_is_asked_again_and_bounded() -> None:
    busy = Delete([End.BUSY, End.ACCEPTED], [End.THERE, End.GONE])
    assert await busy.run() is True
    assert busy.story == ["ask", "look", "ask", "look"]
    ever = Delete([End.BUSY] * 99, [End.THERE] * 99)
    with pytest.raises(errors.SandboxUnavailableError, match="another change"):
        await ever.run(busy_seconds=0.2)


async def test_no_answer_before_the_acknowledgement_is_the_callers_and_after_it_is_waited_out() -> None:
    with pytest.raises(errors.SandboxUnavailableError):
        await Delete([LOST]).run()
    limited = errors.RateLimitError("slow down", retry_after_seconds=0.2)
    later = Delete([End.ACCEPTED], [LOST, limited, End.GONE])
    began = time.monotonic()
    assert await later.run() is True
    assert time.monotonic() - began >= 0.2
    with pytest.raises(errors.AuthenticationError):
        await Delete([End.ACCEPTED], [errors.AuthenticationError("key withdrawn")]).run()


async def test_a_key_that_may_not_delete_is_said_or_the_services_second_way_is_gone() -> None:
    with pytest.raises(errors.AuthenticationError, match="may not delete sandbox s1"):
        await Delete([End.REFUSED]).run()
    second = Delete([End.REFUSED], [End.GONE])

    async def stop_instead() -> End:
        return End.ACCEPTED

    assert await hosted.delete(
        second.ask, second.look, service=SERVICE, sandbox_id="s1", instead=stop_instead
    )
