"""`python -m p2pnode` is `p2pnode`."""

import sys

from p2pnode.cli import main

if __name__ == "__main__":
    sys.exit(main())
