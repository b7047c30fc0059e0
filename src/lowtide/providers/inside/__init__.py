"""The program inside every sandbox that is not local, and the calls it takes over one channel.

`inside.c` is the program, `link` the pair of streams that outlives a channel, `client` the commands over
it, `files` and `forward` what stands on those. docs/inside.md has the frames and the bounds.
"""

from lowtide.providers.inside.channel import Answer, Asleep, Channel, Opener, Spent
from lowtide.providers.inside.client import Client
from lowtide.providers.inside.clients import Clients
from lowtide.providers.inside.process import InsideProcess

__all__ = ["Answer", "Asleep", "Channel", "Client", "Clients", "InsideProcess", "Opener", "Spent"]
