"""How proposed tokens are read."""
