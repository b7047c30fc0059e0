"""The sandbox's first process: a static program of one page that waits, or becomes the command.

It needs no shell, no libc and no file in the image, and costs next to no memory. The source is
``idle.c`` beside this file; the programs below are it, compiled with
``gcc -Os -static -nostdlib -nostartfiles -ffreestanding -fno-stack-protector
-fno-asynchronous-unwind-tables -fno-pie -no-pie -Wl,--build-id=none,-z,norelro,-z,noseparate-code,-N -s``.
"""

from __future__ import annotations

import base64
import os
import zlib

_PROGRAMS = {
    "x86_64": (
        "eNqtVE1ME0EUni1dKkKyJSGE6MFGm1gjFpZ4QCimK628JutBBfXKTxOJgES2wUSlJYWE6WZPktCbHHvkhA3RtmBC8WBimgAqiZqo"
        "SFhUboKHjjPbrREkxoNz6Jt589733ve+nYb98kULx6HisqDziJ1mkNc4e03/TMmvEOprpHFeZEUlRqzNiDfjzIyifWJBe2yx0uVP"
        "Sk8p+vdlNy3gzxD9uL3B9tL1AN4JZOfzhBDpmtQhtXdchdGtBI0F1SZrfVk7qG32SGMw1ALasMMv5kAN1ySbaa6MNwUeojv5AJ73"
        "CpNZut0SJjNiriwLeCXpYTSFWQLR7IjAi5mACjWAfc44+5kWUhyo7c74WEaphlu5w9GNeiDzEAduATD162+ZmYbxHL3XqINWTrop"
        "dZGkGGmBf8rmIGs9zqlFn3PqCr2X0qUGvQ0ZrwPelDGhddekFJt72mZ0vA2YAr8R+LS1cBb4pJMCpSxG5jeBD6heSnc4dALwK4pQ"
        "gKI8yZJiNzgBflcEYbEx5OlVrJ7hUK2YYz0axQp9rAi8lBRYz+xGxhnAq4ZX/3pJHXQF1BsO8YtfJKB1cFLMV03oMOyeOsDLdIzC"
        "bEYqy+ofaKYBV2iTsZhD6BDlb9YyAP3jJFQJ2n1nIqANuqQ0k0cfZHvWUkGs74ZeVCv9XmS3STk6+uORgFDYNiFXJaD7JZBnsXLt"
        "Ajf2PPQ+ssst+qoSdVSO6BoRc+eWH9SSJYPDJsQXfdYExdspiK+4mO7KcQocaUbKMTGnP27J0+8n/EKKVVQDWZiosAHJ6HMyXtJf"
        "J5lqTDC/Abdu6AJ4gXYW3c0r5ekReqbbrRCfDiNzdObcKdG21tYmh8sX7OrtHHCIDe4Gd/0Z8ezpnmCX2BAST5kuhNxDN4eUO0pn"
        "F3IrwbsKcnff7u8PDijoP6xy8w3a/nive99pcXH78itNX/0+f5/5/3ASHZz/uy05oK+HpvMI+nv9n/GUMWo="
    ),
    "aarch64": (
        "eNqlVF1IFFEUPnfurK66iKKgZLS79kOZLSoKaw817lpBGOSyj8G26oZSGqv7ICbs1YqI6GFKCIxyC4tcCAyCKIrU6Md+HpqkJx9m"
        "1kz7IXpsKZvOrHdqXQyCDlzO3O9+3zn33HPvRHc17RYIAdMEuAPGbByk1Fzi+H7xNwUxN/IksICY4man+Mtm6kx/gMIKb+W85vlI"
        "Wxb8uxVwr1KQMcbQIoW4Sklco0I8QWmcAlNwLzMTNPDWtmlQ0VsrX7xDztIxGFtCTRZIySdW9LasM2CVklhFvX2IhBtywc9sUnKA"
        "gZygWfEbZUwxY9mtcGseY4il/nsCYlrJyHAsjynOb0RWdf3CIOq8hCl6VBiTMJ5WhHGtUKeVQHIS4PbccZCnUrGYEnMw5Q1qpFzm"
        "S0RBXo/YJA41CvVgZcpLXDPypvLgcGQz5WkaNsCxKcSALu/Rg8OJ4wFizKxploSvEPBrmGMR+RO4Xg5pNYHwKQbgF8x9YT03uV7L"
        "Z75UjFESFgsa+oIC+M38kzz/1bQ9GXpHDlO+63rJRmDn7qOHCWj2iCBDv3TeCfSiVgTJu4ifqvSM5SA/F5ivxQKvnRaQpfagmwlQ"
        "R0lMSfAcRm2n03KYeU8g9pxA3cdHIA/EQP5sYb5X9kGfivtVCdQi1+cEKLbfh/AHvBdqyciavQQq3mNuo6cqzYsbOqPH5lkYvY1Z"
        "//RDS+tHO+Z7iP03uKOr9P8grgf6d4SP4Fl6p8vdCQoVC1j3HO5HEqEwugjhtlKpT/up+70AtQv8TJqQa8TaSYTDENvXdxZ7hc+o"
        "Of3uBaYdbpXmxs07aNw/S8HJ4cdYS2tHi9s4X2+Hw406+Ytx5mnvg/T5QOxdR8ps9hRWimPmh66v5evGvBLHLGJfBfzw5I+Xey5d"
        "Fy9fE/d4vdsdmxtDLR3BLkd1javGVbWtunYL/wRw9bT3RLojwRZwRUK9EXCF2gOHuoOdIXC1Hu3sDHVF4L8tz6iB/1NW/k+WrZiu"
        "5IsZ+kKuF/j8GZW4X543ZvCtGfMyrq/KwG08kT0DJ6t4ukpdW7l+w1/0pv0CPqxkqA=="
    ),
}


def program() -> bytes | None:
    """The program for this machine, or None for an architecture nobody has compiled it for."""
    packed = _PROGRAMS.get(os.uname().machine)
    return zlib.decompress(base64.b64decode(packed)) if packed else None
