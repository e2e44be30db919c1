"""parallax: large-model training in JAX with data, pipeline, tensor, context and expert parallelism in one program."""
