"""What the compiler built for a machine that is not there, read from the scheduled program's text. No jax."""
