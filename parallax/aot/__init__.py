"""The train step built by the real compiler for a machine that is not there, and read."""
