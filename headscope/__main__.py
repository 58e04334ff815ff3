"""`python -m headscope` is `headscope`."""

from typing import NoReturn

from headscope.cli.signals import listen


def start() -> NoReturn:
    """Run the command line of this process."""
    # Before anything else is imported: that takes long enough for somebody to interrupt it.
    listen()
    from headscope.cli.main import main

    main()


if __name__ == "__main__":
    start()
