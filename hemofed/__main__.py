"""The command: `hemofed`, or `python -m hemofed`."""

from pipeline.cli.main import main

if __name__ == "__main__":
    main()
