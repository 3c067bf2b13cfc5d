"""Plans whose stages are held by groups of devices that run one searched program together."""
