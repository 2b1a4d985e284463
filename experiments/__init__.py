"""Readable scripts, one a question: `python -m experiments.<name> --help`."""
