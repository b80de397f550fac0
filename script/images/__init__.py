"""Container images of the real servers, built here where none can be pulled."""
