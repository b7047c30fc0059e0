"""The spawner: one small single-threaded process that starts sandboxes and enters running ones.

It is run as ``python -I -S .../spawner/__main__.py FD`` with an empty environment and imports nothing
else of lowtide, because it forks for every call and a small process forks fast, and because forking a
program with threads is not safe. It takes requests on a SOCK_SEQPACKET socket; every request brings its
own reply socket, so that nothing waits in line. It ends when its control socket closes; the sandboxes
go on.
"""
