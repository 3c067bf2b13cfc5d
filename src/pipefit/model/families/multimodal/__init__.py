"""Models of several modules: an image encoder, a language model, an image generator."""
