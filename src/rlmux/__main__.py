"""`python -m rlmux`, for where the console script is not on the path."""

from rlmux.cli import main

if __name__ == "__main__":
    main()
