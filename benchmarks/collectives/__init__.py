"""Collectives over unequal parts: lowerings measured in labs, beside their predictions."""
