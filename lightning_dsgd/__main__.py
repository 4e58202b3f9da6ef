"""`python -m lightning_dsgd`: the console script, for launchers that start a module."""

from lightning_dsgd.cli import main

if __name__ == "__main__":
    main()
