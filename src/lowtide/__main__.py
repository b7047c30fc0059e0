"""`python -m lowtide`: the command line, also where its script is not on the PATH."""

from lowtide.cli import main

main()
