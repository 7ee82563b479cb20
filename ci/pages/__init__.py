"""The site of the documents: its generator's hooks, the reference out of the headers, and the blocks of code in pages."""
