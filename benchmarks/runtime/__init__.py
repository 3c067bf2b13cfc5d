"""Speed of the runtime beside torch.distributed.pipelining and plain PyTorch."""
