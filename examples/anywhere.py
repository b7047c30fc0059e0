"""The same code on any provider: python examples/anywhere.py [local | docker | kubernetes | e2b | daytona]"""

import sys

from lowtide import Sandbox

provider = sys.argv[1] if len(sys.argv) > 1 else "local"

with Sandbox.run(provider=provider, tags=["anywhere"]) as sandbox:
    sandbox.write_file("/tmp/sum.py", b"import sys; print(sum(map(int, sys.stdin)))").result()
    result = sandbox.exec(["python3", "/tmp/sum.py"], stdin=b"19\n23\n", check=True).result()
    print(f"{provider}: {result.stdout.strip()}")
    failed = sandbox.exec(["sh", "-c", "echo oops >&2; exit 3"]).result()
    print(f"{provider}: exit code {failed.returncode}, stderr {failed.stderr.strip()!r}")
    print(f"{provider}: {[entry.name for entry in sandbox.list_dir('/tmp').result()]}")
