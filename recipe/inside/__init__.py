"""Standard-library scripts that another Python runs: a venv's, or the one in an image.

They import nothing from ``recipe``.
"""
