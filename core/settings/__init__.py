"""The settings of users: in the program, in a file, in the environment."""
