"""What users set: in the program, in a file, in the environment."""
