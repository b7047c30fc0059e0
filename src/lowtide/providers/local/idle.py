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
        "eNqlU09IFFEYf7PrupnBrKAhdVlwI6VaHelg/omd3M1vYDpUWl39s6CEJjlDHcxdWQWfw94E95bHPXayrXB3Ndi1QxADlhBE"
        "WJE0lp5EO+z0vdnZKJMI+g7zvfd737/f782LhOTLDo4jJXOQi4TtHpGAtQ/Y+KDzZwhiLRgXIGXEacW6rfiilfJKXnWQ33yp"
        "09VPykA5+Xfz2B7oZ4h93Nlka/GmRPek/HLBNE3xhtgjdvdch8mtJMaC5pbjA3kPaF2eaEtY7YD4PW9I0EGL1KbaMFemG7wL"
        "YnsFiS4H+Lk8Lrf4uaygV+SBvk61M5r8ogmx/ATvErKSBrVAg74E+yzwaQ60bl9iKqsch9v60dhmE5jLkABuBSjixjvmFmBa"
        "x/M4Atg55UfqgplmpHnXEtNBjo/75nNB3/w1PBeXyi16mzItAP0i023e9YyJLugZt3WyjoPxrpQPU9MOC8EQSQsgwSG1Ds8x"
        "xwoRUzzrpWNVmWaBvrFQ49sVbbBe0m55ha8hYRfiPZw4G6wxkYSnvRHoGtLnF7NiRc74gJkZNk6xGWv/lJAjODfycFqtsWBo"
        "eletAuSQlOKj9WKayWqMsjWjWxR529IZNTbGo/utysnJ7w95QiLuGbk6Cf2vwHw+Wxm/xE29UN9H97lcsDrZiDLG3pqCfmHt"
        "wVlz1eKwAYlcsCyJ9XaKl6Y0sPtS6rBwtI0oXkE3HncU8N4jL8VZuYaAuTJzzA1m1ngi01VjPcXkZkqHrHoFW9EVHC22X1Aq"
        "MxO4x+WW6spEiK2d9RNYTLs6O1u99cFw31DviFdo9jf7m84J588MhPuEZlVosCFC/GODY8pdpbeP+JXwfYX4++8MD4dHFPL/"
        "Vmm/Hfcf7+z391Uy7kB+lY01HcBP2e/6NDk8/1fvPGQu2QZPkL/3/wFLexb6"
    ),
    "aarch64": (
        "eNqlU29IU1EUP/fdtzl1hGIwyWhv9ocSGyoTZkQ9NisI++DY97HpYlIa00Fiwq5G9CH68EoIlHIfLHL0wSDoD0FqVJgF9Yo+"
        "v81Mi4g+Nspe527v1RwGQQcO993f+/3OOffcc5OHOg4LhIBpAtwFvpsBOb+XDfwr/U1BzIs8GSwg5rlleX7BTJ25/hBg3Woz"
        "eJ3LiW4r/LtVGatGQcEYY6sU0hol6QwV0llK0xSYirW8naWhd/Zdo6re1bj4HjlrZ2B6DTVWkHNPbbjarRfAJufwFG3OMRIP"
        "l0GQ2eXcCAMlS63pm3VMNWM5bXB7GWOItcEHAmIZx+R4qpKprm9E0XT9yijq/ISpelKYljFepkbOSRZozTggNwdwZ+ksKPP5"
        "WExNSUx9gxq5ggWySVC2IzaHriWhDWxMfYH/eN58HnSpjKnPEANaqMeH7kKfR4yZ9U9h/QIETd2cobtfFIvnlsqZ+l3XHTuB"
        "XcIaHDALnT4RFBiWL7uATmRqIPcK8fONvuly5FcAC0Qs8NplAUWOhb1MgFZKUmrWyMFrShXlMPNOIPacQOunx6CMpED5bGGB"
        "l87RgIa1agQ8yA24ADY7H0L8I96d5pjccpRAwwfMzfuu0co01/F7MO+A9z9l+9OzTFHPkpjvEd4R505tcEen8X9o+ED8JEDQ"
        "v1DvzVJoWMFzL2E9sgjVyVWId9fKQ5mfetAP4FkxetKBXB7rIBFOQOrY0EUCQRz1zuL5CC1IXo1WpM054TNiqTo3/gTP0tUT"
        "8fL++nskL+qUL4iZ80uGAiAObiN1dmd+pmvRPWu6vtX4z/eN6PsRG+Nvxrdppt539YZ47bp4xO/fJ+1uj0Z6wn1Sc4u7xd20"
        "t9mzx/gEcA/EBhL9iXAE3InoYALc0VjoeH+4NwrurlO9vdG+BPy3VfIzGG9+/Xsv2D1hPV8s0VcbepMWo7KxFvbtJXxbyb7O"
        "0DeV4LcMvbMEJxusdINzLRrgjr/oTfsFSFpCqw=="
    ),
}


def program() -> bytes | None:
    """The program for this machine, or None for an architecture nobody has compiled it for."""
    packed = _PROGRAMS.get(os.uname().machine)
    return zlib.decompress(base64.b64decode(packed)) if packed else None
