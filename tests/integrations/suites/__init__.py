"""Suites that run in a framework's own virtual environment: scripts/framework_suites."""
