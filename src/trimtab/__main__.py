"""`python -m trimtab` is the command line."""

from trimtab.cli.main import main

main()
