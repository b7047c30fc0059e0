"""`pip install` in the default sandbox: it works, and where there is no network one line says what to do."""

from __future__ import annotations

import io
import zipfile

from lowtide import Sandbox


def test_pip_installs_beside_what_is_visible_and_says_what_is_missing() -> None:
    with Sandbox.run() as box:
        box.write_file("/tmp/tiny-1.0-py3-none-any.whl", _wheel()).result()
        installing = ["pip", "install", "--no-index", "/tmp/tiny-1.0-py3-none-any.whl"]
        done = box.exec(installing, timeout_seconds=200).result()
        assert done.returncode == 0, done.stderr
        assert "lowtide:" not in done.stderr
        seen = box.exec(["python3", "-c", "import tiny, click; print(tiny.__file__)"]).result()
        assert seen.stdout.startswith("/opt/python/lib/"), seen.stderr
        failed = box.exec(["python3", "-m", "pip", "install", "not-there"], timeout_seconds=200).result()
        assert failed.returncode != 0
        (hint,) = [line for line in failed.stderr.splitlines() if line.startswith("lowtide:")]
        assert 'network="internet"' in hint
        assert "pypi.org" in hint
    with Sandbox.run() as other:
        assert other.exec(["python3", "-c", "import tiny"]).result().returncode == 1


def test_the_hint_recommends_nothing_that_the_sandbox_already_has() -> None:
    with Sandbox.run(network=["allowed.invalid", "files.pythonhosted.org:8443"]) as box:
        failed = box.exec(["pip", "install", "not-there"], timeout_seconds=200).result()
        assert failed.returncode != 0
        (hint,) = [line for line in failed.stderr.splitlines() if line.startswith("lowtide:")]
        assert "allow-list of this sandbox does not have pypi.org" in hint
        assert "internet" not in hint
        listed = box.denied_connections().result(20)
        assert ("pypi.org", None, "dns") in {(one.host, one.port, one.protocol) for one in listed}
    with Sandbox.run(network="internet") as box:
        # The test runs without the internet: nobody tells whether the name exists.
        other = box.exec(["pip", "install", "--retries=0", "not-there"], timeout_seconds=200).result()
        assert 'network="internet"' not in other.stderr
        assert "has no network" not in other.stderr


def _wheel() -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(
            "tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    return written.getvalue()
