"""The JavaScript SDKs of E2B, Daytona, Modal and Runloop, unmodified, against the emulators, as docs/emulators.md shows it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGES = {
    "e2b": ("e2b@2",),
    # Of one version: for a while a registry may have a newer one of the second that asks for a newer first.
    "daytona": ("@daytonaio/sdk@0.218", "@aws-sdk/client-s3@3.1131", "@aws-sdk/lib-storage@3.1131"),
    "modal": ("modal@0.11",),
    "runloop": ("@runloop/api-client@1",),
}
E2B = """
import { Sandbox } from 'e2b'
const query = { query: { metadata: { from: 'javascript' } } }
const sandbox = await Sandbox.create({ metadata: { from: 'javascript' } })
await sandbox.files.write([{ path: '/tmp/a.txt', data: 'one' }, { path: '/workspace/b.txt', data: 'two' }])
const done = await sandbox.commands.run('cat /tmp/a.txt /workspace/b.txt; echo err >&2')
const listed = await Sandbox.list(query).nextItems()
let chunks = ''
await sandbox.commands.run('for i in 1 2 3; do echo $i; done', { onStdout: (text) => { chunks += text } })
await sandbox.kill()
const left = await Sandbox.list(query).nextItems()
const { stdout, stderr } = done
console.log(JSON.stringify({ stdout, stderr, chunks, listed: listed.length, left: left.length }))
"""
DAYTONA = """
import { Daytona, Image } from '@daytonaio/sdk'
import { fileURLToPath } from 'url'
const sandbox = await new Daytona().create({ labels: { from: 'javascript' } })
const done = await sandbox.process.executeCommand('echo hello; exit 3')
await sandbox.fs.uploadFile(Buffer.from('content'), 'a.txt')
const file = (await sandbox.fs.downloadFile('a.txt')).toString()
await sandbox.process.createSession('s')
await sandbox.process.executeSessionCommand('s', { command: 'mkdir w && cd w && echo served > index.html' })
await sandbox.process.executeSessionCommand('s', { command: 'python3 -m http.server 3000', runAsync: true })
const signed = await sandbox.getSignedPreviewUrl(3000, 60)
let page = ''
for (let n = 0; n < 300 && page !== 'served\\n'; n++) {
  const answer = await fetch(signed.url + '/index.html')
  page = answer.ok ? await answer.text() : ''
  if (!answer.ok) await new Promise((done) => setTimeout(done, 100))
}
await sandbox.delete()
const image = Image.base('x').addLocalFile(fileURLToPath(import.meta.url), '/given')
const built = await new Daytona().create({ image }, { timeout: 0 })
const given = (await built.process.executeCommand('cat /given')).result.includes('addLocalFile')
await built.delete()
console.log(JSON.stringify({ result: done.result, code: done.exitCode, file, page, given }))
"""
MODAL = """
import { ModalClient } from 'modal'
const modal = new ModalClient()
const app = await modal.apps.fromName('from-javascript', { createIfMissing: true })
const image = modal.images.fromRegistry('python:3.11')
const sandbox = await modal.sandboxes.create(app, image, { name: 'one', encryptedPorts: [8000], env: { A: 'b' } })
const process = await sandbox.exec(['sh', '-c', 'echo $A; cat; echo err >&2; exit 3'])
const input = process.stdin.getWriter()
await input.write('given')
await input.close()
const stdout = await process.stdout.readText()
const stderr = await process.stderr.readText()
const code = await process.wait()
await sandbox.filesystem.writeText('content', '/srv/deep/a.txt')
const file = await sandbox.filesystem.readText('/srv/deep/a.txt')
await sandbox.setTags({ from: 'javascript' })
let listed = 0
for await (const one of modal.sandboxes.list({ appId: app.appId, tags: { from: 'javascript' } })) listed++
const same = (await modal.sandboxes.fromName('from-javascript', 'one')).sandboxId === sandbox.sandboxId
await sandbox.exec(['python', '-m', 'http.server', '8000', '--directory', '/srv/deep'])
const url = (await sandbox.tunnels())[8000].url
let page = ''
for (let n = 0; n < 300 && page !== 'content'; n++) {
  page = await fetch(url + '/a.txt').then((answer) => answer.text()).catch(() => '')
  if (page !== 'content') await new Promise((done) => setTimeout(done, 100))
}
const taken = await sandbox.snapshotFilesystem()
const second = await modal.sandboxes.create(app, taken, { command: ['cat', '/srv/deep/a.txt'] })
const kept = await second.stdout.readText()
await sandbox.terminate()
const ended = await sandbox.wait()
console.log(JSON.stringify({ stdout, stderr, code, file, listed, same, page, kept, ended }))
modal.close()
"""
RUNLOOP = """
import { Runloop, RunloopSDK } from '@runloop/api-client'
const client = new Runloop({ http2: false })
const made = await client.devboxes.createAndAwaitRunning({ name: 'javascript', metadata: { from: 'javascript' } })
const done = await client.devboxes.executeAndAwaitCompletion(made.id, { command: 'echo out; echo err >&2; exit 3' })
await client.devboxes.writeFileContents(made.id, { file_path: 'a.txt', contents: 'content' })
const file = await client.devboxes.readFileContents(made.id, { file_path: 'a.txt' })
let listed = 0
for await (const one of client.devboxes.list({ status: 'running' })) if (one.name === 'javascript') listed++
const devbox = await new RunloopSDK({ http2: false }).devbox.create({ name: 'object' })
const second = await devbox.cmd.exec('for i in 1 2 3; do echo $i; done')
const chunks = await second.stdout()
await devbox.shutdown()
const ended = await client.devboxes.shutdown(made.id)
const { stdout, stderr, exit_status } = done
console.log(JSON.stringify({ stdout, stderr, exit_status, file, listed, chunks, ended: ended.status }))
"""


def installed(service: str) -> Path:
    """Its SDK from npm, installed once on this machine and kept."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed (Debian: apt-get install nodejs npm)")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide-tests"
    folder = cache / "-".join(name.strip("@").replace("/", "-") for name in PACKAGES[service])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            install = [
                "npm",
                "install",
                "--no-audit",
                "--no-fund",
                "--prefix",
                str(folder),
                *PACKAGES[service],
            ]
            done = subprocess.run(install, capture_output=True, text=True, timeout=280)
            if done.returncode != 0:
                pytest.skip(f"npm could not install the SDK of {service}: {done.stderr.strip()[-300:]}")
            (folder / "installed").touch()
    return folder


def run(service: str, script: str) -> Any:
    file = installed(service) / f"script-{os.getpid()}.mjs"  # modules are looked for beside the script
    file.write_text(script)
    command = [sys.executable, "-m", "lowtide", "emulate", service, "--", "node", str(file)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    finally:
        file.unlink()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_e2bs_javascript_sdk_runs_without_any_setting() -> None:
    assert run("e2b", E2B) == {
        "stdout": "onetwo",
        "stderr": "err\n",
        "chunks": "1\n2\n3\n",
        "listed": 1,
        "left": 0,
    }


def test_daytonas_typescript_sdk_runs_without_any_setting() -> None:
    wanted = {"result": "hello\n", "code": 3, "file": "content", "page": "served\n", "given": True}
    assert run("daytona", DAYTONA) == wanted


def test_modals_typescript_sdk_runs_without_any_setting() -> None:
    assert run("modal", MODAL) == {
        "stdout": "b\ngiven",
        "stderr": "err\n",
        "code": 3,
        "file": "content",
        "listed": 1,
        "same": True,
        "page": "content",
        "kept": "content",
        "ended": 137,
    }


def test_runloops_typescript_sdk_runs_over_http_1() -> None:
    assert run("runloop", RUNLOOP) == {
        "stdout": "out\n",
        "stderr": "err\n",
        "exit_status": 3,
        "file": "content",
        "listed": 1,
        "chunks": "1\n2\n3\n",
        "ended": "shutdown",
    }


def test_a_client_that_knows_nothing_of_the_emulator_does_not_get_out() -> None:
    """An SDK that reads only the domain, and no proxy: it fails by name, with nothing sent."""
    script = """
    import dns from 'node:dns/promises'
    const failed = await fetch(`https://api.${process.env.E2B_DOMAIN}/sandboxes`).catch((error) => error.cause.code)
    console.log(JSON.stringify({ failed }))
    """
    assert run("e2b", script)["failed"] in ("ENOTFOUND", "EAI_AGAIN")
