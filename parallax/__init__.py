"""parallax: large-model training in JAX with data, pipeline and tensor parallelism in one program."""
