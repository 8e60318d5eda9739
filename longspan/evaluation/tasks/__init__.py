"""The tasks, one family a file; `longspan.registry` finds them, `longspan tasks` lists them."""
