"""Weights in Hugging Face safetensors files."""
