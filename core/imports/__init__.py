"""The lazy import of public names, and the extras that install optional packages."""
