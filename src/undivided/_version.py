"""The version of this package, as pyproject.toml has it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("undivided")
except PackageNotFoundError:  # imported from its sources, without an installation
    __version__ = "0+unknown"
