"""The version of the package; it is also the version of the meter."""

__version__ = "0.1.0"
