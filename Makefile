# One environment in .venv; every target makes it first, so that a fresh clone needs nothing else.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.docs-installed
# tests start hundreds of short processes: half of them beside the other half, and none compiles our files anew
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env system demo test test-all lint docs bench clean

env: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev]'
	touch $@

# What tests use beyond Python, only where we may install it. A test whose part is missing says so.
system:
	@sh tools/system-packages.sh

demo: env
	$(BIN)/hemofed run --baselines
	$(BIN)/hemofed demo edge

test: env system
	$(PYTEST)

# slow ones, which kill and measure, have the machine for themselves
test-all: test
	$(BIN)/python -m pytest -m slow

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# the documentation as a site, in site/; it needs no network
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

bench: env system
	$(BIN)/python benchmarks/rounds.py
	$(BIN)/python benchmarks/cells.py
	$(BIN)/python benchmarks/codecs.py
	$(BIN)/python benchmarks/private_step.py
	$(BIN)/python benchmarks/secure_aggregation.py
	$(BIN)/python benchmarks/flare_rounds.py
	$(BIN)/python benchmarks/edge.py

clean:
	rm -rf .venv build dist site *.egg-info
