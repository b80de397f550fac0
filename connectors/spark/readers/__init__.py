"""Formats for `read` and `readStream`: what is read, how it is divided into tasks, and its rows."""
