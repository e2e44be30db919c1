"""Imported as parallax.meshes; the folder stands at the top of the repository so that its files are easy to find."""

if __name__ == "meshes":
    raise ImportError("import parallax.meshes, not meshes: this folder is a part of the parallax package")
