"""The program `p2pnode`, also as `python -m p2pnode`.

Importing the command line takes a moment, in which a person may press Ctrl-C. Then it ends like a command that was
broken off, without a stack trace.
"""

import sys


def main() -> int:
    """Run the command of this process's arguments and return its exit code."""
    try:
        from p2pnode.cli import main as run_command
    except KeyboardInterrupt:
        return 130  # `p2pnode.errors.INTERRUPTED`, which cannot be imported here
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
