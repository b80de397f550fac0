"""Every sink by itself, beside the plain bulk load of the same rows into the same server."""
