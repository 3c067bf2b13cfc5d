"""pipefit fits a training job to the cluster people really have: it measures, plans, runs and shows."""

__version__ = "0.1.0"
