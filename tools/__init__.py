"""Small command-line programs over the package's public names; `moe-async TOOL` runs them after an install."""
