"""rlmux for Python: what the command line does, with values instead of text. `import rlmux` offers these names."""
