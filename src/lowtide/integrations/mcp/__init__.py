"""`lowtide mcp`: sandboxes as tools of the Model Context Protocol, for every client that speaks it.

Needs the extra ``lowtide[mcp]``. What a connection made ends with it.
"""
