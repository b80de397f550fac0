"""The engine: protocol, state, storage, runtime and the public API."""
