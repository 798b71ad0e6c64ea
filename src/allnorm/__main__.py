"""``python -m allnorm`` is the ``allnorm`` command."""

from allnorm.cli import main

if __name__ == "__main__":
    main()
