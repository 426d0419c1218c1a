"""The `distlab` command. Importing it does not import torch; a command does when it runs."""

from distlab.cli.entry import main

__all__ = ["main"]
