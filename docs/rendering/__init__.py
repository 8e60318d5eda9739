"""What `docs/render.py` is made of: one file for each sort of generated text."""
