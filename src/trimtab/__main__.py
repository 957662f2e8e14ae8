"""Run the command line: `python -m trimtab`, and the script `trimtab`."""

import sys


def main() -> None:
    """Import and run the command line. Ctrl-C during the import ends like a later one, without a traceback."""
    try:
        from trimtab.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
