# Two commands for a fresh machine with Python 3.11 and make: `make demo` and `make test`.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Tests start thousands of interpreters, and each would compile the package again, which takes 0.15 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all neighbours neighbours-long neighbours-suites jax metabox faults soak cluster cluster-demo lint docs browser picture bench bench-auto bench-collect bench-start wheel-check clean
.DEFAULT_GOAL := help

help: ## Show this list.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.demo ## Measure every mode on CartPole and LunarLander; Ray is started automatically.
	$(BIN)/parallelenv compare CartPole-v1 LunarLander-v3 --num-envs 16

# Tests mostly wait for their workers, so there are more processes than cores on a small machine. Ray is installed with
# the package, so a test that is skipped because Ray is missing counts as failed.
PYTEST := PARALLELENV_REQUIRE_RAY=1 $(BIN)/python -m pytest
PARALLEL ?= -n 3 --no-loadscope-reorder

test: $(VENV)/.test ## Run the tests; about 7 minutes on 2 cores.
	$(PYTEST) $(PARALLEL) $(PYTEST_ARGS)

test-all: $(VENV)/.test ## Run every test, before a release: also long tests, clusters, the browser and other libraries; about 2 hours.
	$(PYTEST) $(PARALLEL) --hypothesis-profile long -m "not cluster and not browser and not neighbours and not jax" $(PYTEST_ARGS)
	$(MAKE) cluster browser neighbours neighbours-long jax

neighbours: $(VENV)/.neighbours ## Test the adapters with Stable-Baselines3, Tianshou and RLlib, and EnvPool as a member; a minute.
	PARALLELENV_REQUIRE_NEIGHBOURS=1 $(PYTEST) $(PARALLEL) -m "neighbours and not long" tests/adapters $(PYTEST_ARGS)

neighbours-long: $(VENV)/.neighbours ## Compare the adapters with the vector envs of other libraries for thousands of steps in every mode.
	PARALLELENV_REQUIRE_NEIGHBOURS=1 $(PYTEST) -m "neighbours and long" tests/adapters $(PYTEST_ARGS)

neighbours-suites: $(VENV)/.neighbours $(if $(NEIGHBOURS),,build/neighbours) ## Run the tests of Gymnasium, Stable-Baselines3 and Tianshou on the adapters; 15 minutes. NEIGHBOURS= a folder with a checkout of each.
	$(BIN)/python -m tests.adapters.suites $(or $(NEIGHBOURS),build/neighbours) $(SUITES_ARGS)

# Only their tests, of the commits for which tests/adapters/suites/known_failures.txt was written.
build/neighbours:
	git clone -qn https://github.com/Farama-Foundation/Gymnasium $@/gymnasium && git -C $@/gymnasium checkout 3f0476a8cc22 -- tests
	git clone -qn https://github.com/DLR-RM/stable-baselines3 $@/stable-baselines3 && git -C $@/stable-baselines3 checkout e05d2dbe6eda -- tests
	git clone -qn https://github.com/thu-ml/tianshou $@/tianshou && git -C $@/tianshou checkout f2402056b03a -- test

jax: $(VENV)/jax/.done ## Test a vector env in JAX, of gymnax, as a member; a minute.
	PARALLELENV_REQUIRE_RAY=1 $(VENV)/jax/bin/python -m pytest -m jax tests/adapters/test_gymnax.py $(PYTEST_ARGS)

metabox: $(VENV)/metabox/.done ## Train MetaBox's agents with its own class and with ParallelEnv in every mode, and compare their weights; up to 2 hours.
	$(VENV)/metabox/bin/python -m tests.metabox $(METABOX_ARGS)

faults: $(VENV)/.test ## Cause every fault in every mode and print the recovery times; about 8 minutes.
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

soak: $(VENV)/.test ## Disturb all modes for ten minutes in total, and account for every transition; SOAK_ARGS="--seed 3".
	$(BIN)/python -m tests.soak --seconds 600 $(SOAK_ARGS)

cluster: $(VENV)/.test ## Test the Ray modes on clusters of two and three nodes on this machine; about 4 minutes.
	$(PYTEST) -m cluster tests/cluster tests/test_notebooks.py $(PYTEST_ARGS)

cluster-demo: $(VENV)/.test ## Start a Ray cluster of two nodes on this machine and compare the modes on it.
	$(BIN)/python -m tests.cluster

lint: $(VENV)/.lint ## Check style, format, types, and imports between modules.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/prose.py

docs: $(VENV)/.docs ## Build the documentation into build/docs; a warning is an error.
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --jobs auto docs build/docs
	$(BIN)/python docs/check.py build/docs

browser: $(VENV)/.browser ## Run notebooks in JupyterLab in Chromium (apt-get install chromium); about 40 seconds.
	PARALLELENV_REQUIRE_BROWSER=1 $(PYTEST) -m browser tests/browser $(PYTEST_ARGS)

picture: $(VENV)/.browser ## Update the picture of JupyterLab in the documentation (apt-get install chromium).
	PARALLELENV_REQUIRE_BROWSER=1 PARALLELENV_SCREENSHOTS=build/screenshots $(PYTEST) -m browser -k front_page tests/browser
	cp build/screenshots/notebook.png docs/img/notebook.png

bench: $(VENV)/.bench ## Measure every mode and the peers; about 35 minutes, or 6 with BENCH_ARGS=--quick.
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-auto: $(VENV)/.bench ## Compare the choice of para_mode="auto" with every mode that it chooses from; about 5 minutes.
	$(BIN)/python -m benchmarks.auto $(BENCH_ARGS)

bench-collect: $(VENV)/.bench ## Compare two collectors with one; a minute.
	$(BIN)/python -m benchmarks.collect $(BENCH_ARGS)

bench-start: $(VENV)/.test ## Measure the start of three pools whose package takes 3 s to import; 3 minutes.
	$(BIN)/python -m benchmarks.start_up $(BENCH_ARGS)

wheel-check: $(VENV)/.test ## Build the wheel, and use it from a folder with another backends/ in it.
	BUILD_PYTHON=$(abspath $(BIN)/python) .ci/wheel-check

clean: ## Remove the virtual environment and all build results.
	rm -rf $(VENV) build dist parallelenv.egg-info .pytest_cache .mypy_cache .ruff_cache .grimp_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: one per set of packages, made again when the requirements change. The install is
# editable: setuptools maps both folders, so an edit takes effect immediately.
$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	touch $@

$(VENV)/jax/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)/jax
	$(VENV)/jax/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[jax]'
	touch $@

# MetaBox pins older versions of packages that work in newer ones, so it is installed without them, in its own environment.
$(VENV)/metabox/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)/metabox
	$(VENV)/metabox/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[metabox]'
	$(VENV)/metabox/bin/python -m pip --disable-pip-version-check --quiet install --no-deps metaevobox==2.0.2 pypop7==0.0.82
	touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.neighbours $(VENV)/.lint $(VENV)/.docs $(VENV)/.browser $(VENV)/.bench: $(VENV)/.%: $(VENV)/.python pyproject.toml
	$(PIP) install --editable '.[$*]'
	touch $@
