"""Predicted step times beside measured ones: on this machine, in labs, and of published runs."""
