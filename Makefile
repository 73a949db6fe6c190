# SPDX-License-Identifier: Apache-2.0

# The interpreter that the environment is built on; deploy/dev/setup reads it.
export PYTHON
# Test processes at a time.
JOBS ?= 2
# More arguments for pytest: make test ARGS='-k lease'
ARGS ?=
# What make install installs, as in DAEMONS=coordinator: both where nothing is said.
DAEMONS ?=
# A folder of wheels for make install; without one, the package index is asked.
export WHEELS
# For the image of the compose cluster; without it, one is made from Debian's packages.
export BASE
# Of the simulated cluster, whose nodes have eight devices each.
NODES ?= 2048
HOURS ?= 24
SEED ?= 1

# Before a command: its programs, and etcd, are looked for in the environment first.
IN := PATH="$(CURDIR)/.venv/bin:$$PATH"

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: ## make .venv and find etcd; quick where it is done already
	@deploy/dev/setup

.PHONY: demo
demo: setup ## kill a node of a small training job here, and watch it recover
	@$(IN) hotspare demo

.PHONY: test
test: setup ## run the tests
	@echo '==> pytest tests, $(JOBS) at a time'
	@$(IN) python -m pytest tests -n $(JOBS) --dist loadgroup $(ARGS)

.PHONY: test-gpu
test-gpu: setup ## run the tests that need a GPU
	@$(IN) python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		|| echo '==> torch finds no GPU here: these tests will be skipped'
	@echo '==> pytest tests/gpu'
	@$(IN) python -m pytest tests/gpu $(ARGS)

.PHONY: test-systemd
test-systemd: setup wheels ## test the units under a real systemd, in containers
	@deploy/dev/docker
	@deploy/base-image hotspare-systemd-base systemd systemd-sysv dbus python3 python3-venv \
		make iproute2 procps etcd-server etcd-client
	@echo '==> pytest tests/systemd'
	@$(IN) HOTSPARE_TEST_SYSTEMD=1 python -m pytest tests/systemd $(ARGS)

.PHONY: image
image: setup wheels ## build the image of the compose cluster: BASE=an image with Python
	@deploy/dev/docker
	@deploy/compose/image

.PHONY: cluster-up
cluster-up: image ## start a cluster of containers with docker-compose
	@deploy/compose/cluster up

.PHONY: cluster-demo
cluster-demo: image ## kill a node's container under a job there, and watch it recover
	@deploy/compose/cluster demo

.PHONY: cluster-test
cluster-test: image ## kill, pause and cut off containers of a cluster of its own
	@echo '==> pytest tests/compose'
	@$(IN) HOTSPARE_TEST_COMPOSE=1 python -m pytest tests/compose $(ARGS)

.PHONY: cluster-down
cluster-down: ## take the cluster of containers away
	@deploy/compose/cluster down

.PHONY: model-check
model-check: setup ## explore all states of the protocol; takes hours
	@$(IN) python -m tests.modelcheck $(JOBS) $(ARGS)

.PHONY: lint
lint: setup ## check format, types, imports, dependencies, stubs, scripts
	@deploy/dev/lint

.PHONY: format
format: setup ## format the code, and mend what ruff can mend
	@$(IN) ruff format .
	@$(IN) ruff check --fix .

.PHONY: protos
protos: ## generate the stubs in protos/ from its .proto files
	@deploy/dev/protos

.PHONY: simulate
simulate: setup ## simulate a cluster's failures: NODES=2048 HOURS=24 SEED=1
	@$(IN) python -m tests.simulator --nodes $(NODES) --hours $(HOURS) --seed $(SEED) $(ARGS)

.PHONY: bench
bench: setup ## run the benchmarks; they write build/bench.json
	@$(IN) python -m benchmarks

.PHONY: lock
lock: ## write requirements-dev.lock anew, with the newest versions
	@deploy/dev/lock

.PHONY: wheels
wheels: ## collect all wheels in build/wheels, to install where no registry is reached
	@deploy/wheels

.PHONY: install
install: ## put the daemons and their systemd units on this machine, as root
	@deploy/systemd/install $(DAEMONS)

.PHONY: uninstall
uninstall: ## stop the daemons, and take away all that install has put here
	@deploy/systemd/uninstall

.PHONY: clean
clean: ## remove what the targets above have made, the environments too
	rm -rf .venv .venv-protos build dist .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache
	find . -name .git -prune -o -name __pycache__ -type d -exec rm -rf {} +
