"""Decoders by options: one set of modules, and a small file in `types/` for each model type that maps its config.json
to the options and its tensor names to files."""
