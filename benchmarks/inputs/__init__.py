"""Preparation of training samples: time that a trainer waits for data."""
