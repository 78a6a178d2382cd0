"""Optimizers whose state is low-rank."""
