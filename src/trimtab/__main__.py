"""Run the command line with `python -m trimtab`."""

from trimtab.cli.main import main

main()
