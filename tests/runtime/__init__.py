"""The agent's view: the action server and the runtimes."""
