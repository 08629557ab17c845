PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo lab test test-slow test-faults test-lab test-gpu check format clean

setup: .venv/dev  ## make .venv and install what the checks and tests need

.venv/%: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

demo: .venv/demo  ## train on digits over four processes with eight methods; prints a table and the path of a report
	$(BIN)/gradsieve demo

lab: setup  ## measures the lab's figures anew, exchanges and trainings by bandwidth: an hour on two quiet cores
	benchmarks/lab.sh

test: setup  ## every test but the slow ones, those of many faults, of networks, and those for a GPU
	$(BIN)/pytest -n auto --dist worksteal -m "not slow and not gpu and not faults and not root"

test-slow: setup  ## the full matrices: most of an hour on two cores
	$(BIN)/pytest -m "slow and not gpu"

test-faults: setup  ## workers killed and stopped, again and again, and elastic jobs: minutes on two cores
	$(BIN)/pytest -n auto --dist loadfile -m faults

test-lab: setup  ## hosts in network namespaces, and jobs over them; needs iproute2, and root or user namespaces
	$(BIN)/pytest -m root

test-gpu:  ## on a machine with CUDA, in an environment of your own
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests

check: setup  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
