"""Readable scripts, one per question: `python -m experiments.<name> --help`."""

from experiments._help import print_help

print_help()
