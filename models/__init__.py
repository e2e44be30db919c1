"""Imported as parallax.models; the folder stands at the top of the repository so that its files are easy to find."""

if __name__ == "models":
    raise ImportError("import parallax.models, not models: this folder is a part of the parallax package")
