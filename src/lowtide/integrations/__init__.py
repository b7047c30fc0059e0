"""Integrations: lowtide as the sandbox of agent frameworks. One module and one extra each; none is loaded unless used."""
