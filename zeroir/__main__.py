"""``python -m zeroir`` is the command line, which is how torchrun starts it."""

from zeroir.cli import main

if __name__ == "__main__":
    main()
