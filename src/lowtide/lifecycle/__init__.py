"""Lifecycle: how a sandbox comes to be written down, ended, kept and found again. The reason lowtide exists."""
