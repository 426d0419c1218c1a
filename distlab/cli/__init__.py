"""The `distlab` command. Importing it does not import torch; commands do so when they run."""

from distlab.cli.entry import main

__all__ = ["main"]
