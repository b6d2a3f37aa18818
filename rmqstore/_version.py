"""The version of the package, the one place that states it; the build reads this file without importing the package."""

__version__ = "0.1.0.dev0"
