"""Vision-language models of `transformers`: one file for each model type, which maps its config.json to options."""
