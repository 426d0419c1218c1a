"""The `distlab` command. Importing it does not import torch; a command does when it runs."""

from distlab.cli.app import main

__all__ = ["main"]
