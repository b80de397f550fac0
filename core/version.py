"""The version, in its own module, so that slots need not import the whole package."""

VERSION = "0.1.0"
