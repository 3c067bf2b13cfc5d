"""Model types of the decoder, one file each: its config.json as options, and its tensor names."""
