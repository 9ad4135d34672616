# Every target creates .venv and installs what it needs; a second run installs nothing.
# On a machine without a GPU, torch without CUDA is smaller by gigabytes:
#   make TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu' install
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready
CPP := find tgi_server benchmarks \( -name '*.cpp' -o -name '*.h' \) -print0 | xargs -0 $(BIN)/clang-format
# Modules are compiled once, also where the environment says otherwise: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo serve test real agents check proto reference format screenshots site dist clean
.DEFAULT_GOAL := help

help:  ## Lists the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(READY)  ## Creates .venv with everything that the other targets need.

# What the services need to run; the kernels are compiled beside the first start. Python compiles modules as it needs them.
$(RUNS): pyproject.toml constraints.txt tools/system-packages.sh
	@tools/system-packages.sh $(PYTHON) venv
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing: $(TORCH)"
	@$(PIP) --no-compile $(TORCH)
	@echo "installing: oatmill and its dependencies"
	@$(PIP) --no-compile -c constraints.txt -e '.[engine]'
	@touch $@

$(READY): $(RUNS)
	@echo "installing: what tests and checks need"
	@tools/system-packages.sh $(PYTHON) venv compiler
	@$(PIP) -c constraints.txt -e '.[engine,dev]'
	@echo "installing: the CPU kernels, compiled for this machine"
	@$(BIN)/python -m tgi_server.engine.kernels || echo "continuing without them: plain torch is used, which is slower"
	@touch $@
	@echo "installed in $(VENV)"

demo: $(RUNS)  ## Starts both services, makes real calls, prints the answers, stops everything.
	@$(BIN)/python -m oatmill demo

serve: $(RUNS)  ## Runs both services in the foreground: HTTP on 8080, gRPC on 8000.
	@$(BIN)/python -m oatmill serve --grpc-port 8000

# Three on two cores: while one waits for a process or a clock, the others compute.
test: $(READY)  ## Runs the test suite, three files at a time. More: make test ARGS=--runslow
	@$(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

real: $(READY)  ## Tests trained models, which it fetches into runs/real_models (1.5 GB).
	@$(BIN)/python -m pytest --real tests/real $(ARGS)

agents: $(READY)  ## Runs sessions of agents, which it fetches into runs/agents. Needs Node.js.
	@$(BIN)/python -m pytest --agents tests/agents $(ARGS)

check: $(READY)  ## Lint, formatting, types, import rules, regular expressions, stubs, generated pages.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(CPP) --dry-run --Werror
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tools.expressions
	@$(BIN)/python -m tools.stubs --check
	@$(BIN)/python -m tools.reference --check
	@$(BIN)/python -m tools.helm --check

format: $(READY)  ## Formats the code and mends what the linter can mend.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(CPP) -i

proto: $(READY)  ## Compiles proto/*.proto into shared/stubs.
	@$(BIN)/python -m tools.stubs

reference: $(READY)  ## Writes docs/reference from the code, and the Helm chart from the manifests.
	@$(BIN)/python -m tools.reference
	@$(BIN)/python -m tools.helm

screenshots: $(READY)  ## Makes the pictures of the page in docs/images. Needs Chromium.
	@$(BIN)/python -m tools.screenshots

site: $(RUNS)  ## Builds the documents as a site into dist/site.
	@$(PIP) mkdocs-material==9.8.2
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m tools.site

dist: $(READY)  ## Builds sdist, wheel, kernels for all CPUs and SBOM into dist/. Less: make dist ARGS=x86-64-v3
	@$(BIN)/python -m tools.dist $(ARGS)

clean:  ## Removes .venv and caches.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
