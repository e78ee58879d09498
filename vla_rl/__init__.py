"""vla-rl: reinforcement learning of vision-language-action policies in MuJoCo worlds."""
