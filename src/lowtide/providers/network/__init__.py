"""The public internet or an allow-list: what they mean, and the proxy that enforces them. See docs/network.md."""
