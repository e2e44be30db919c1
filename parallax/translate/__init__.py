"""A Megatron-LM command line as a run file. No jax before the sizes of a model are looked up."""
