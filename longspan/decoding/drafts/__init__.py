"""Where proposed tokens come from."""
