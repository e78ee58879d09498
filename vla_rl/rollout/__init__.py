"""The rollout engine: which starts to run, running them in slots, and which groups are worth training on."""
