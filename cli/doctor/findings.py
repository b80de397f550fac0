"""What the checks of databases import."""

from onceflow.core.diagnosis import Area, Finding

__all__ = ["Area", "Finding"]
