"""The daemon's git calls, done by the git in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.daytona.answers import Refused, body_of, strings_of, text_of
from lowtide.emulators.daytona.sandbox import Sandbox

if TYPE_CHECKING:
    from lowtide.emulators.daytona.toolbox import Toolbox

# The credentials stay in the environment: a command line can be read by everybody in there.
_HELPER = "!f() { echo username=$LOWTIDE_GIT_USER; echo password=$LOWTIDE_GIT_PASSWORD; }; f"
_REASONS = (
    (r"not a git repository|cannot change to", 404, "GIT_REPO_NOT_FOUND"),
    (r"authentication failed|could not read (username|password)|invalid username", 401, "GIT_AUTH_FAILED"),
    (r"a branch named .* already exists", 409, "GIT_BRANCH_EXISTS"),
    (
        r"branch .* not found|did not match any file\(s\) known|not a valid object name|couldn't find remote ref|"
        r"remote branch .* not found|invalid reference",
        404,
        "GIT_BRANCH_NOT_FOUND",
    ),
    (r"\[remote rejected\]", 409, "GIT_REMOTE_REJECTED"),
    (r"\[rejected\]|failed to push", 409, "GIT_PUSH_REJECTED"),
    (r"would be overwritten|local changes", 409, "GIT_DIRTY_WORKTREE"),
    (r"conflict", 409, "GIT_MERGE_CONFLICT"),
    (
        r"repository .* (not found|does not exist)|does not appear to be a git repository",
        404,
        "GIT_REPO_NOT_FOUND",
    ),
    (
        r"unable to access|could not resolve|connection|could not read from remote",
        502,
        "GIT_TRANSPORT_FAILED",
    ),
)
_STATUS = {
    ".": "Unmodified",
    "?": "Untracked",
    "M": "Modified",
    "T": "Modified",
    "A": "Added",
    "D": "Deleted",
    "R": "Renamed",
    "C": "Copied",
    "U": "Updated but unmerged",
}


class Git:
    def __init__(self, toolbox: Toolbox) -> None:
        self.machine = toolbox.sandboxes.machine

    def add_calls(self, add: Callable[..., None]) -> None:
        for path, call in (
            ("init", self.git_init),
            ("clone", self.git_clone),
            ("add", self.git_add),
            ("commit", self.git_commit),
            ("push", self.git_push),
            ("pull", self.git_pull),
            ("checkout", self.git_checkout),
            ("branches", self.git_create_branch),
            ("reset", self.git_reset),
            ("restore", self.git_restore),
            ("remotes", self.git_add_remote),
            ("config", self.git_set_config),
            ("config/user", self.git_configure_user),
            ("credentials", self.git_authenticate),
        ):
            add("POST", f"/git/{path}", call)
        add("DELETE", "/git/branches", self.git_delete_branch)
        add("GET", "/git/branches", self.git_branches)
        add("GET", "/git/status", self.git_status)
        add("GET", "/git/history", self.git_history)
        add("GET", "/git/remotes", self.git_remotes)
        add("GET", "/git/config", self.git_get_config)

    async def _git(
        self,
        sandbox: Sandbox,
        path: str | None,
        *words: str,
        login: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        data: bytes | None = None,
    ) -> str:
        """Run git and return what it says. Refused with the daemon's code for what went wrong."""
        code, said, complaint = await self._try(
            sandbox, path, *words, login=login, environment=environment, data=data
        )
        if code == 0:
            return said
        for pattern, status, name in _REASONS:
            if re.search(pattern, complaint, re.IGNORECASE):
                raise Refused(status, complaint.strip(), code=name)
        raise Refused(400, complaint.strip() or f"git ended with {code}")

    async def _try(
        self,
        sandbox: Sandbox,
        path: str | None,
        *words: str,
        login: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        data: bytes | None = None,
    ) -> tuple[int, str, str]:
        variables = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C", **(environment or {})}
        argv = ["git"]
        if login and login.get("password"):
            variables |= {
                "LOWTIDE_GIT_USER": str(login.get("username") or "git"),
                "LOWTIDE_GIT_PASSWORD": str(login["password"]),
            }
            argv += ["-c", "credential.helper=", "-c", f"credential.helper={_HELPER}"]
        if login and login.get("insecure_skip_tls"):
            argv += ["-c", "http.sslVerify=false"]
        if path is not None:
            argv += ["-C", self.machine.path(sandbox, path)]
        strings_of(variables, "the login")
        code, said, complaint = await self.machine.run(sandbox, (*argv, *words), data, environment=variables)
        return (
            code,
            said.decode("utf-8", "replace"),
            complaint.decode("utf-8", "replace") + (said.decode("utf-8", "replace") if code else ""),
        )

    # ------------------------------------------------------------ repositories

    async def git_init(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        words = ["init", "-q"]
        if body.get("bare"):
            words.append("--bare")
        if body.get("initial_branch"):
            words += ["-b", _plain(body, "initial_branch")]
        await self._git(sandbox, None, *words, "--", self.machine.path(sandbox, text_of(body, "path")))
        return web.Response(status=201)

    async def git_clone(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        path = text_of(body, "path")
        words = ["clone", "-q"]
        if body.get("branch"):
            words += ["--branch", _plain(body, "branch")]
        if body.get("depth"):
            words += ["--depth", str(int(body["depth"]))]
        target = self.machine.path(sandbox, path)
        await self._git(sandbox, None, *words, "--", text_of(body, "url"), target, login=body)
        if body.get("commit_id"):
            await self._git(sandbox, path, "checkout", "-q", _plain(body, "commit_id"), "--")
        return web.Response(status=200)

    async def git_push(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        words = ["push", "-q"] + (["--set-upstream"] if body.get("set_upstream") else [])
        remote = _plain(body, "remote") if body.get("remote") else "origin"
        branch = _plain(body, "branch") if body.get("branch") else "HEAD"
        await self._git(sandbox, text_of(body, "path"), *words, "--", remote, branch, login=body)
        return web.Response(status=200)

    async def git_pull(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        words = ["pull", "-q", "--no-rebase"]
        if body.get("remote") or body.get("branch"):
            words += ["--", _plain(body, "remote") if body.get("remote") else "origin"]
            words += [_plain(body, "branch")] if body.get("branch") else []
        await self._git(sandbox, text_of(body, "path"), *words, login=body)
        return web.Response(status=200)

    async def git_remotes(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        said = await self._git(sandbox, _path(request), "remote", "-v")
        found = dict(line.split()[:2] for line in said.splitlines() if line.endswith("(fetch)"))
        return web.json_response({"remotes": [{"name": name, "url": url} for name, url in found.items()]})

    async def git_add_remote(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        path, name, url = (text_of(body, key) for key in ("path", "name", "url"))
        if body.get("overwrite"):
            await self._try(sandbox, path, "remote", "remove", "--", name)
        await self._git(sandbox, path, "remote", "add", "--", name, url)
        if body.get("fetch"):
            await self._git(sandbox, path, "fetch", "-q", "--", name)
        return web.Response(status=201)

    # ------------------------------------------------------------ changes

    async def git_add(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        await self._git(sandbox, text_of(body, "path"), "add", "--", *_files(body))
        return web.Response(status=200)

    async def git_commit(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        path, name, email = (text_of(body, key) for key in ("path", "author", "email"))
        person = {
            f"GIT_{role}_{what}": value
            for role in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", name), ("EMAIL", email))
        }
        words = ["commit", "-q", "-F", "-"] + (["--allow-empty"] if body.get("allow_empty") else [])
        message = text_of(body, "message").encode()
        await self._git(sandbox, path, *words, environment=person, data=message)
        said = await self._git(sandbox, path, "rev-parse", "HEAD")
        return web.json_response({"hash": said.strip()})

    async def git_reset(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        mode = str(body.get("mode") or "mixed")
        if mode not in ("soft", "mixed", "hard", "merge", "keep"):
            raise Refused(400, f"invalid reset mode: {mode}")
        target = _plain(body, "target") if body.get("target") else "HEAD"
        if body.get("files"):
            await self._git(sandbox, text_of(body, "path"), "reset", "-q", target, "--", *_files(body))
        else:
            await self._git(sandbox, text_of(body, "path"), "reset", "-q", f"--{mode}", target)
        return web.Response(status=200)

    async def git_restore(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        words = ["restore"] + (["--staged"] if body.get("staged") else [])
        if body.get("worktree") or (body.get("worktree") is None and not body.get("staged")):
            words.append("--worktree")
        if body.get("source"):
            words.append(f"--source={text_of(body, 'source')}")
        await self._git(sandbox, text_of(body, "path"), *words, "--", *_files(body))
        return web.Response(status=200)

    # ------------------------------------------------------------ branches

    async def git_branches(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        path = _path(request)
        said = await self._git(sandbox, path, "for-each-ref", "--format=%(refname:short)", "refs/heads")
        _, current, _ = await self._try(sandbox, path, "symbolic-ref", "-q", "--short", "HEAD")
        return web.json_response({"branches": said.split(), "current": current.strip()})

    async def git_create_branch(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        await self._git(sandbox, text_of(body, "path"), "checkout", "-q", "-b", _plain(body, "name"), "--")
        return web.Response(status=201)

    async def git_checkout(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        await self._git(sandbox, text_of(body, "path"), "checkout", "-q", _plain(body, "branch"), "--")
        return web.Response(status=200)

    async def git_delete_branch(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        await self._git(sandbox, text_of(body, "path"), "branch", "-q", "-D", "--", text_of(body, "name"))
        return web.Response(status=204)

    # ------------------------------------------------------------ looking

    async def git_status(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        said = await self._git(sandbox, _path(request), "status", "--porcelain=v2", "--branch", "-z", "-uall")
        return web.json_response(_status(said))

    async def git_history(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        said = await self._git(sandbox, _path(request), "log", "--format=%H%x00%an%x00%ae%x00%aI%x00%B%x1e")
        commits = []
        for entry in said.split("\x1e"):
            fields = entry.strip("\n").split("\0")
            if len(fields) == 5:
                names = ("hash", "author", "email", "timestamp", "message")
                commits.append(dict(zip(names, fields, strict=True)))
        return web.json_response(commits)

    # ------------------------------------------------------------ configuration

    async def git_get_config(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        key = request.query.get("key", "")
        scope = _scope(request.query.get("scope"))
        code, said, _ = await self._try(sandbox, request.query.get("path"), "config", *scope, "--get", key)
        return web.json_response({"value": said.removesuffix("\n")} if code == 0 else {})

    async def git_set_config(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        scope = _scope(body.get("scope") or "global")
        await self._git(
            sandbox, body.get("path"), "config", *scope, _plain(body, "key"), str(body.get("value", ""))
        )
        return web.Response(status=200)

    async def git_configure_user(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        scope = _scope(body.get("scope") or "global")
        for key in ("name", "email"):
            await self._git(sandbox, body.get("path"), "config", *scope, f"user.{key}", text_of(body, key))
        return web.Response(status=200)

    async def git_authenticate(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        """Kept in the sandbox in clear text, as the name of the SDK's method warns."""
        body = await body_of(request)
        name, password = text_of(body, "username"), text_of(body, "password")
        await self._git(sandbox, None, "config", "--global", "credential.helper", "store")
        lines = {
            "protocol": str(body.get("protocol") or "https"),
            "host": str(body.get("host") or "github.com"),
            "username": name,
            "password": password,
        }
        asked = "".join(f"{key}={value}\n" for key, value in lines.items() if "\n" not in value)
        await self._git(sandbox, None, "credential-store", "store", data=asked.encode() + b"\n")
        return web.Response(status=200)


def _status(said: str) -> dict[str, Any]:
    """From git's porcelain format, version 2."""
    found: dict[str, Any] = {"currentBranch": "", "fileStatus": [], "ahead": 0, "behind": 0}
    found |= {"branchPublished": False, "detached": False, "upstream": ""}
    entries = iter(said.split("\0"))
    for entry in entries:
        if entry.startswith("# branch.head "):
            head = entry.removeprefix("# branch.head ")
            found["detached"] = head == "(detached)"
            found["currentBranch"] = "" if found["detached"] else head
        elif entry.startswith("# branch.upstream "):
            found |= {"upstream": entry.removeprefix("# branch.upstream "), "branchPublished": True}
        elif entry.startswith("# branch.ab "):
            ahead, behind = entry.removeprefix("# branch.ab ").split()
            found |= {"ahead": int(ahead), "behind": -int(behind)}
        elif entry[:2] in ("1 ", "2 ", "u "):
            fields = {"1": 8, "2": 9, "u": 10}[entry[0]]
            name = entry.split(" ", fields)[-1]
            extra = next(entries, "") if entry[0] == "2" else ""
            found["fileStatus"].append(
                {
                    "name": name,
                    "staging": _STATUS.get(entry[2], "Modified"),
                    "worktree": _STATUS.get(entry[3], "Modified"),
                    "extra": extra,
                }
            )
        elif entry.startswith("? "):
            one = {"name": entry[2:], "staging": "Untracked", "worktree": "Untracked", "extra": ""}
            found["fileStatus"].append(one)
    return found


def _path(request: web.Request) -> str:
    path = request.query.get("path")
    if not path:
        raise Refused(400, "path is required")
    return path


def _plain(body: dict[str, Any], name: str) -> str:
    """A word that git cannot take for an option."""
    value = text_of(body, name)
    if value.startswith("-"):
        raise Refused(400, f"{name} must not begin with -")
    return value


def _files(body: dict[str, Any]) -> list[str]:
    files = body.get("files")
    if not isinstance(files, list) or not files or not all(isinstance(one, str) and one for one in files):
        raise Refused(400, "files is required", code="INVALID_REQUEST_BODY")
    return files


def _scope(scope: Any) -> list[str]:
    if scope in (None, ""):
        return []
    if scope not in ("global", "local", "system"):
        raise Refused(400, f"invalid scope: {scope}")
    return [f"--{scope}"]
