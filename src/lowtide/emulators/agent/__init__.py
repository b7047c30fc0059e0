"""The file agent: a small program inside a sandbox that does file work as one of its users."""
