"""Every clause of the two-phase contract, a module for each kind."""
