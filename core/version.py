"""The version: apart from the package itself, so that slots need not import all of it."""

VERSION = "0.1.0"
