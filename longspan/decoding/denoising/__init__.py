"""Ways to attend to the prefix while a block is denoised, one a file."""
