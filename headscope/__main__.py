"""`python -m headscope` is `headscope`."""

from typing import NoReturn

from headscope.minimum import leave_older_pythons


def start() -> NoReturn:
    """Run the command line of this process."""
    leave_older_pythons()
    from headscope.cli.signals import listen

    # Before anything else is imported: that takes long enough for somebody to interrupt it.
    listen()
    from headscope.cli.main import main

    main()


if __name__ == "__main__":
    start()
