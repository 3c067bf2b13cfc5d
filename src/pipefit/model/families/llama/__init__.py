"""The Llama family: Llama 2 and 3, Mistral, Qwen 2 and 3, Mixtral, Qwen3-MoE."""
