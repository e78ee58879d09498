"""vla-rl: reinforcement learning of vision-language-action policies in MuJoCo worlds."""

import os

# Torch's idle threads spin by default. Beside busy simulation threads, or other users of the machine, that turns two
# threads into much less than one. Read when torch is first imported, so it must be set here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
