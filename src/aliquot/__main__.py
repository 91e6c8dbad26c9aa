"""`python -m aliquot` is the `aliquot` command."""

from aliquot.cli.main import run

if __name__ == "__main__":
    run()
