"""Our generated tasks as files of the harness: YAML, and the Python file that feeds them."""
