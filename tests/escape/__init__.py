"""Attempts to get out of a sandbox: one list, run by `make escape` and by the test-suite."""
