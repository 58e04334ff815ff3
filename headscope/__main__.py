"""`python -m headscope` is `headscope`."""

from headscope.cli.main import main

if __name__ == "__main__":
    main()
