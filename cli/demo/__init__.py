"""`onceflow demo`: a real pipeline, real kills, and a proof by the target itself."""
