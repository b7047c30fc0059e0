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
        "eNqlU09IFGEU/2bXdTODWUFD6rLgQkq1OtLBUmMnd/MNTIdKrat/FpTQJGepg7krq+DnMDfBveVxj51sK9xdDXbtEMSAJQQR"
        "ViSNpSfRDju9b3Y20iSC3mHe9973/v1+871oSL7q4DhSEge5TJj1mAQsO2D7R52/QtDXgnEBUkacVqzbii9KKa+kow5yQJc6"
        "Xf+sDJSTfxePrYF+gfinnU12Fm9JdE/KLxdM0xR7xG6xq/smTG4lMRZUt6wN5D2gdnpiLeFIO2j3vSFBBzVam2rFXJlu8C6I"
        "7xUkuhzg5/J43OLnsoJekQf6JtXGYPKLJsTzE7xLyEoq1AIN+hLss8CnOVC7fImprHIS7ujH45tNYC5DArgVoOg33jO1ANM6"
        "3mvowM4pP0IXzDQDzbuWGA+yNu6bzwV98zfwXlwqt+BtyrQA9KtMt3nXc0a6oGfc1s06Dsa7MmVFg3elfFgk7bBMDJbUAEId"
        "itThJWZbwWKKZ111rC/TLNC3ltf4fk0drJfU217hW0jYBa2bE2eDNSbC8bQ1Al1DIvjFrFiRMz5iZoYNVmzGBnlGyDFEgIic"
        "VmssGJrejVQBoklK2mi9mGYEG6PszIAX6d62GEe2jfHY/iXl9OSPRzw+C/eMXJ2E/tdgvpit1K5wUy8jH2L7XC5YnWxEQuPv"
        "TEG/uPbwnLlqYdiARC5YlsR6O8XfpzSwP6fUYeFYK1G8gm48aS/gC4i+EmflGgLmyswJN5hZ46lMV431FCOecR6y6hVsbldw"
        "tPh+QanMTKCNx62IKxMlNnfWc7CQdnZ0XPLWB8N9Q70jXqHZ3+xvOi9cODsQ7hOaI0KD7SLEPzY4ptxTevuIXwk/UIi//+7w"
        "cHhEIf8rlfYOuf/Yt4N7VhLuUH6V7Ws65G+09/sMOTr/d+08Yq4e23mK/L3/T8nxGbQ="
    ),
    "aarch64": (
        "eNqlVF9IU1EY/849d/OqIxSDSUrbzKLEhorC7KEumxWEPTj2PjZdKKUx3YMsYUcjeogebkmBUu7BQvdkIARRpPYP/xR0i57v"
        "ZqZF9NwIu313O7fmMAj64OO753d+v+/7zvkON3Gy85RACJgmwEMwVnMg59YyxyXxNwUxD/JksICY45bk+HkzdWbcS2FHlDiv"
        "ayPWY4V/twoeNQoK5hjfopDSKEmlqZDKUJqiwFTs5f0CDX6wHRpT9e7G1Y/I2b4Es9uosYKcfSlhtFmvgSRn8RTtjnESJRIE"
        "mE3OjjJQMtSamqlhqpnLIcGDDcwhVgceCYil7VMTyXKmur4TRdP122Oo8xGm6glhVsZ86So5u2CBtrQdsosA8+uXQVnK5WJq"
        "0snUd6iRy5g/kwDlAGKL6FoC2kFi6hruGXVzddCdJUx9VYCNcmwJMaD5Hr3oLvQniDHzTNMkGhIgYOoWuW6+IJfRj7OUqT90"
        "3X4Q2I03GGEBurwiKDAi33QBnUxXQXYV8auN3tlS5JcB84ct8NZlAUXuDXmYAG2UJNUMr2H0NFlQw6x7C7EVAm1fnoEymgTl"
        "q4X5XzvG/Br2qhFoRa7fhc/D8Riin3Gemn1q3xkCDZ+wtjELjZanDJ0xG3MuxkyS0p97TBfcYxzrPcW5GdzpXeY2iPvBkePR"
        "CwAB33KdJ0OhYRPPvY79yCJUJrYg2lMtx9M/9YAPoHWT30knco1cJ4hwHpJn49cJBPD5dxW+meCy06PRspT5dox3Y6m4MvEC"
        "z9LdF/YY9+vrc3pQp3wz7rzgXZO4H8Th/aTG5shh1ei127pey/eNdSN6PWIzAn5498zVee/cF+/eE0/7fMechzsi4b7QgLO5"
        "xd3ibjra3HqEfwK4h3qHYoOxUBjcschwDNyR3uC5wVB/BNzdF/v7IwMx+G8rN87A/wU7/wN5WxN28sUifSXXmzRGZR7z644i"
        "vlS0ruH6piL8Odc7inCyS6S7nGudg/V/0Zv2C92YSbM="
    ),
}


def program() -> bytes | None:
    """The program for this machine, or None for an architecture nobody has compiled it for."""
    packed = _PROGRAMS.get(os.uname().machine)
    return zlib.decompress(base64.b64decode(packed)) if packed else None
