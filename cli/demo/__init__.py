"""`onceflow demo`: a real pipeline, real kills, and a proof by SQL."""
