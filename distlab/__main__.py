"""`python -m distlab` is the `distlab` command."""

from distlab.cli import main

main()
