"""Real controllers and the runtime that drives them with a policy. Never imports torch."""
