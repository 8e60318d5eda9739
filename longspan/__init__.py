"""longspan: more context for less memory and time, and what that costs in quality, measured."""
