"""The action server: what runs inside the sandbox, shipped as one self-contained file (`bundle`).

Everything here but `bundle` runs on Python 3.9 with nothing but its standard library, and imports
little: the time from launch to ready and the memory of an idle server are promises (docs/runtimes.md).

core without I/O    models (actions, observations) · output · shell · edit
what touches things terminal (a bash on a PTY) · oneoff · files · interpreter
the server          http · app · executor · serve · relay · __main__
"""

VERSION = 1
"""Of the JSON that crosses the wire. A number that is higher than this one's is refused."""
