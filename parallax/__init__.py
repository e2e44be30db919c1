"""parallax: large-model training in JAX with data, pipeline, tensor and context parallelism in one program."""
