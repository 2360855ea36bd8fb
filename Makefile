# Everstream: `make serve` and `make test` are all a newcomer needs; both set up .venv first and only when the lock changed.
# TORCH_INDEX: one more package index for pip, for machines that want torch's small CPU build or a CUDA build from elsewhere.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
ARGS ?=
PIP_FLAGS = --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
BIN = .venv/bin
KERNELS = model/decoder/kernels/cpu
KERNEL_SOURCES = $(wildcard $(KERNELS)/*.cpp $(KERNELS)/*.h $(KERNELS)/build.py)

# Tests that only compute: two processes at once. The others start servers and look at the clock.
COMPUTING = tests/checkpoint tests/kernels tests/parity tests/sampler \
	$(filter-out tests/engine/test_worker.py,$(wildcard tests/engine/test_*.py))

.PHONY: help install install-test serve test lint format lock bench soak clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

install: .venv/.kernels  ## environment, pinned dependencies, compiled kernels

install-test: install .venv/.test .venv-front/.test  ## the same, plus what the tests need

serve: install  ## the default model on http://127.0.0.1:8000; ARGS="--port 8080 --model ..." for more
	@$(BIN)/python -m app serve $(ARGS)

test: install-test  ## everything; tests of the front end run where torch is not installed
	.venv-front/bin/python -m pytest tests/unit tests/http
	$(BIN)/python -m pytest -n 2 --dist loadfile $(COMPUTING)
	$(BIN)/python -m pytest tests --ignore=tests/unit --ignore=tests/http $(COMPUTING:%=--ignore=%)

lint: .venv/.test  ## ruff, mypy --strict, hadolint, shellcheck
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy app model bench
	$(BIN)/hadolint Dockerfile
	$(BIN)/shellcheck docker/*.sh .ci/run

format: .venv/.test  ## what ruff can mend by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.test  ## closed-loop load on a running server; ARGS="--concurrency 32"
	@$(BIN)/python -m bench.serve $(ARGS)

soak: .venv/.test  ## twenty minutes at 1.5 x capacity against a server of its own
	@$(BIN)/python -m bench.soak $(ARGS)

# Locks hold exact versions and nothing of the machine that made them. The `+cpu` of a local torch build is cut off,
# so that the same lock fits CPU and CUDA builds.
LOCK = $(BIN)/pip-compile --quiet --strip-extras --no-header --no-annotate --no-emit-index-url \
	--no-emit-trusted-host --no-emit-find-links --no-emit-options --allow-unsafe pyproject.toml
lock: .venv/.base  ## new lock files from pyproject.toml
	$(BIN)/pip install $(PIP_FLAGS) pip-tools
	$(LOCK) --extra worker --extra otel -o requirements.lock
	$(LOCK) --all-extras -c requirements.lock -o requirements-test.lock
	$(LOCK) --extra front-test -c requirements-test.lock -o requirements-front.lock
	sed -i 's/^\(torch==[0-9.]*\)+.*/\1/' requirements*.lock

clean:  ## remove environments and what was built
	rm -rf .venv .venv-front build .mypy_cache .ruff_cache .pytest_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.base: requirements.lock | .venv/bin/python
	@echo "Installing the pinned dependencies (a few minutes the first time) …"
	$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements.lock
	@touch $@

.venv/.test: requirements-test.lock .venv/.base
	$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements-test.lock
	@touch $@

.venv-front/bin/python:
	$(PYTHON) -m venv .venv-front

.venv-front/.test: requirements-front.lock | .venv-front/bin/python
	.venv-front/bin/python -m pip install $(PIP_FLAGS) -r requirements-front.lock
	@touch $@

.venv/.kernels: .venv/.base $(KERNEL_SOURCES)
ifneq ($(wildcard $(KERNELS)/build.py),)
	@$(BIN)/python -m model.decoder.kernels.cpu.build || \
		echo "The C++ kernels were not built; the server uses its slower torch reference instead."
endif
	@touch $@
