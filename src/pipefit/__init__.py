"""pipefit fits a training job to a given cluster: it profiles the cluster, plans, trains and reports."""

__version__ = "0.1.0"
