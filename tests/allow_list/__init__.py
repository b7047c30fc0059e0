"""An allow-list against somebody who tries: a small world in network namespaces, and attempts made in it."""
