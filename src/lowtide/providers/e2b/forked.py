"""After a fork."""


def repair() -> None: ...
