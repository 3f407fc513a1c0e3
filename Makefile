# make run      set up .venv and run the main job on the embedded data; ENGINE=ray: as flwr run does, on Ray
# make test     set up .venv and run the tests, some 5 minutes on two idle cores; FILE=tests/strategies/core: one room
# make test-real set up .venv and run the thorough tests on real Ray and SuperLinks, and the first guide, some 6 minutes
# make test-studies set up .venv and run the tests of the studies: theory, reproduced papers, maps, benchmarks
# make test-flower VERSION=1.42.0 (or nightly): run the library's tests on that Flower, in a folder of its own
# make test-all set up .venv and run every test, hours: all cases of all products, and faults of real deployments
# make docs     set up .venv and make the documentation, site/; python3 -m http.server -d site shows it, search and all
# make bench    set up .venv and measure speed beside stock Flower and a bare PyTorch loop
PYTHON ?= python3
BIN := .venv/bin
ENGINE ?= auto
INSTALLED := .venv/.installed

export FLWR_TELEMETRY_ENABLED ?= 0

.PHONY: run compare test test-real test-studies test-flower test-all docs bench lint constraints clean

run: $(INSTALLED)
	$(BIN)/fedapp run --engine $(ENGINE)

compare: $(INSTALLED)
	$(BIN)/python run_simulation.py --compare

# Two processes, each with whole files, in the order of their names: what starts Ray or a SuperLink comes early. A room
# or a file alone needs one process.
PYTEST := $(BIN)/python -m pytest -n $(if $(FILE),0,2) --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTEST) $(FILE) $(SELECT)

test-real: $(INSTALLED)
	$(PYTEST) tests/end_to_end tests/deploy tests/docs -m ci

test-studies: $(INSTALLED)
	$(PYTEST) studies/tests $(SELECT)

# Flower alone: its requirements are the environment's, as an index may lack one of the versions that it asks for.
FLOWER = .venv/flower-$(VERSION)
test-flower: $(INSTALLED)
	$(if $(VERSION),,$(error VERSION is missing: make test-flower VERSION=1.42.0, or VERSION=nightly))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(FLOWER) \
		$(if $(filter nightly,$(VERSION)),--pre flwr-nightly,flwr==$(VERSION))
	PYTHONPATH=$(CURDIR)/$(FLOWER):$(CURDIR) $(BIN)/python -c "import flwr; assert '$(FLOWER)/' in flwr.__file__"
	PYTHONPATH=$(CURDIR)/$(FLOWER):$(CURDIR) $(PYTEST) $(or $(FILE),tests/strategies) $(SELECT)

test-all:
	$(MAKE) test test-studies SELECT="-m ''"

# A link that leads nowhere is an error. (Its authors tell of a successor at every start.)
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(INSTALLED)
	$(BIN)/python -m studies.benchmarks

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The exact versions that were tested, for every platform and Python version that pyproject.toml allows, from 3.11.0 on.
constraints: $(INSTALLED)
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --no-annotate --no-header \
		--upgrade --output-file constraints.txt

$(INSTALLED): pyproject.toml studies/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]' --editable ./studies
	touch $@

clean:
	rm -rf .venv
