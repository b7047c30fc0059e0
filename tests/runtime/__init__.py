"""The agent's view: the action server and the runtimes."""

import pytest

pytest.register_assert_rewrite("tests.runtime.cases")
