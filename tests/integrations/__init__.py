"""Agent frameworks, MCP: lowtide as their sandbox."""
