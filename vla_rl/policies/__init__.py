"""Policies behind the `vla_rl.policy.Policy` seam, and the pieces that they share."""
