"""Plans of multimodal models: planning time, order of samples, and runs in a lab."""
