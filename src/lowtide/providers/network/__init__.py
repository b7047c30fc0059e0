"""The allow-list: what its entries mean, and the proxy that holds a sandbox to them. See docs/network.md."""
