"""What a run costs on a machine, by formula: memory, from a model's shape and a run file alone. No jax."""
