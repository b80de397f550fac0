"""What is decided, as plain state machines: facts in, decisions out. No I/O, clock or thread."""
