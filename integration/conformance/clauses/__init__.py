"""The clauses of the two-phase contract, with a module for each kind."""
