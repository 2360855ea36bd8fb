"""`python -m app`: hands the command line to app.cli."""

import sys

from app import cli


def main() -> None:
    """Run one command and leave with its exit code."""
    sys.exit(cli.run())


if __name__ == "__main__":
    main()
