"""Python sandboxes for AI agents on any provider, with nothing left behind."""
