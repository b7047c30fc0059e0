"""Starts the spawner. Kept this short because a program's own file is compiled anew at every start."""

import os
import sys

if __name__ == "__main__":
    # Last, so that no file beside the package can stand in for one of Python's own modules.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from spawner.loop import main  # type: ignore[import-not-found]

    main(int(sys.argv[1]))
