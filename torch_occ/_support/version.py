"""The version of the package; saved runs belong to it, and pyproject.toml reads it here."""

VERSION = "0.3.0"
