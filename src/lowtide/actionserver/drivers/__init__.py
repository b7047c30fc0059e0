"""The programs that hold an interpreter's state, one process for each context.

Each is told three arguments: the descriptor it reads requests from, the one it answers on, and the mark
it prints on standard output and error when a request is done, behind everything the code printed.
"""
