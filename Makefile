# Everything a developer runs, and CI too (.ci/run). Needs make, git and one Python; the rest is installed below build/.

PYTHON ?= python3.11
# The Pythons that the types are checked for. tests/run.py runs the unit tests on those it finds.
PYTHONS := 3.10 3.11 3.12 3.13 3.14
UV_VERSION := 0.13.9

VENVS := build/venvs
DEV := $(VENVS)/dev/bin
UV := $(VENVS)/tools/bin/uv
UV_STAMP := $(VENVS)/tools/.uv-$(UV_VERSION)
RUN := $(PYTHON) tests/run.py

# A Python that isn't here is said to be missing, never downloaded.
export UV_PYTHON_DOWNLOADS := never
# Trust whom the system trusts, as pip, git and Go do: behind a proxy of one's own, uv's list is not enough.
export UV_SYSTEM_CERTS ?= true
# Where this is set, as in many containers, each process of an engine compiles torch and all else anew: 20 s of a core.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDEXPANSION:
# Keep the stamps between the steps of an environment.
.PRECIOUS: $(VENVS)/%/.locked $(VENVS)/%/.ready

.PHONY: help
help: ## Show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "PYTHON=$(PYTHON) makes the environments in $(VENVS); say 'make PYTHON=... TARGET' for another one."

##### Use

.PHONY: demo
demo: $(VENVS)/vllm/.ready ## Run the demo on a real vLLM on this machine's CPU (DEMO_ARGS=... for its options)
	$(VENVS)/vllm/bin/python -m examples.vllm_demo $(DEMO_ARGS)

##### Downstream: the collector, Prometheus, dashboards

# Both from their Go modules, into the ignored folder, once. The builder is of the release that it builds.
GO ?= go
COLLECTOR_VERSION := 0.161.0
PROMETHEUS_MODULE := github.com/prometheus/prometheus/cmd
DOWNSTREAM := build/otelcol-specdec build/prometheus build/promtool build/deploy-check

.PHONY: collector
collector: build/otelcol-specdec ## Build the OpenTelemetry Collector of collector/builder.yaml (minutes the first time)

build/otelcol-specdec: collector/builder.yaml
	$(GO) run go.opentelemetry.io/collector/cmd/builder@v$(COLLECTOR_VERSION) --config $< --ldflags='-s -w'
	mv build/otelcol/otelcol-specdec $@

.PHONY: prometheus
prometheus: build/prometheus build/promtool ## Build Prometheus and promtool (no web UI: its assets are not in the module)

# Without the service discoveries, which need the SDKs of half of all clouds.
build/prometheus build/promtool: collector/prometheus/module/go.mod collector/prometheus/module/go.sum
	cd collector/prometheus/module && $(GO) build -trimpath -tags remove_all_sd,netgo -ldflags '-s -w' \
		-o $(CURDIR)/$@ $(PROMETHEUS_MODULE)/$(@F)

# Reads the compose file and the Kubernetes manifests as their own tools do.
build/deploy-check: $(wildcard collector/deploy/check/*)
	cd $(<D) && $(GO) build -o $(CURDIR)/$@ .

.PHONY: mixin
mixin: $(VENVS)/downstream/.ready ## Write the rules, alerts and dashboards of collector/ anew from collector/mixin
	$(VENVS)/downstream/bin/python -m collector.mixin

.PHONY: semconv
semconv: $(VENVS)/dev/.ready ## Write the tables of README.md and docs/ anew from the registry in semconv/
	$(DEV)/python -m semconv

.PHONY: images
images: $(VENVS)/downstream/.ready $(VENVS)/vllm/.ready $(DOWNSTREAM) ## Plot a run of a real vLLM, from the data of a real Prometheus, for the README
	$(VENVS)/vllm/bin/python -m collector.plot run build/plot
	$(VENVS)/downstream/bin/python -m collector.plot draw build/plot docs/images

##### Documentation

.PHONY: docs
docs: $(VENVS)/docs/.ready ## Build the documentation's site in build/site; a warning or a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(VENVS)/docs/bin/mkdocs build --strict

##### Tests

.PHONY: test
test: environments ## Run all tests: unit, a part of test-pythons, test-docs, test-vllm, a part of test-versions, test-sglang, test-collector, test-ray, test-drift, test-release
	$(RUN) unit drift pythons-in-ci docs vllm versions-in-ci sglang collector ray release

.PHONY: unit
unit: $(VENVS)/dev/.ready ## Run the unit tests (fast: no engine)
	$(RUN) unit

.PHONY: test-pythons
test-pythons: $(UV_STAMP) ## Run the unit tests on every other Python found, on 3.10 with the oldest OpenTelemetry, on 3.12 one in between
	$(RUN) pythons

.PHONY: test-docs
test-docs: $(VENVS)/docs/.ready $(DOWNSTREAM) ## Build the site without a network, check its links, run its snippets, check its commands
	$(RUN) docs

.PHONY: test-vllm
test-vllm: $(VENVS)/vllm/.ready ## Run the tests with a real vLLM engine on the CPU
	$(RUN) vllm

.PHONY: test-versions
test-versions: $(VENVS)/vllm/.ready ## Run the step tables on every release of vLLM that is named in docs/versions.md, and the engines that run here
	$(RUN) versions

.PHONY: test-sglang
test-sglang: $(VENVS)/sglang/.ready ## Run the tests with a real SGLang on the CPU
	$(RUN) sglang

.PHONY: test-collector
test-collector: $(VENVS)/downstream/.ready $(VENVS)/vllm/.ready $(DOWNSTREAM) ## Run the tests with a real collector and a real Prometheus
	$(RUN) collector

.PHONY: test-ray
test-ray: $(VENVS)/ray/.ready ## Run the tests with a real Ray
	$(RUN) ray

.PHONY: test-drift
test-drift: $(VENVS)/dev/.ready ## Run the tests that read the engines' newest releases on the registry: are they still as the hooks know them?
	$(RUN) drift

.PHONY: test-release
test-release: $(VENVS)/dev/.ready ## Run the tests of the files to be released: what is in them, and the wheel alone on every Python found
	$(RUN) release

##### Release

DIST ?= dist

# The time of the last commit in the archives, so that a second build of it has the same bytes. The wheel is built from
# the sdist, which therefore has all that it needs.
.PHONY: dist
dist: $(VENVS)/dev/.ready ## Build sdist and wheel into dist/, and check their metadata
	rm -rf $(DIST)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
		$(UV) build --quiet --no-build-isolation --python $(DEV)/python --out-dir $(DIST)
	$(DEV)/twine check --strict $(DIST)/*

##### Code

.PHONY: lint
lint: $(VENVS)/dev/.ready ## Check style, format and, for every supported Python, types
	$(DEV)/ruff check
	$(DEV)/ruff format --check
	@printf '%s\n' $(PYTHONS) | xargs -P 2 -I VERSION sh -c \
		'said=$$($(DEV)/mypy --python-version VERSION); status=$$?; echo "mypy for VERSION: $$said"; exit $$status'

.PHONY: format
format: $(VENVS)/dev/.ready ## Format the code and fix what can be fixed
	$(DEV)/ruff check --fix-only
	$(DEV)/ruff format

.PHONY: hooks
hooks: $(VENVS)/dev/.ready ## Install the git hooks
	$(DEV)/pre-commit install

##### Environments

.PHONY: environments
environments: $(VENVS)/dev/.ready $(VENVS)/vllm/.ready $(VENVS)/sglang/.ready $(VENVS)/downstream/.ready $(VENVS)/docs/.ready $(VENVS)/ray/.ready $(DOWNSTREAM) ## Create the environments, build the collector and Prometheus (the other targets do it as needed)

# An environment holds exactly what one committed file of tests/environments lists; dev.txt unless named here.
LOCK_vllm := vllm
LOCK_sglang := sglang
LOCK_downstream := downstream
LOCK_docs := docs
LOCK_ray := ray
LOCK_python3.10 := oldest
LOCK_python3.12 := middle

# Every other release of vLLM that is tested has a list of its own name. The schedulers share one torch; the engines that
# run on a CPU need the one that they were built with.
RELEASES := $(patsubst tests/environments/%.in,%,$(wildcard tests/environments/vllm-[0-9]*.in))
$(foreach release,$(RELEASES),$(eval LOCK_$(release) := $(release)))
TORCH_vllm-0.22.1 := engine
TORCH_vllm-0.26.0 := engine

$(UV_STAMP):
	$(PYTHON) -m venv --clear $(VENVS)/tools
	$(VENVS)/tools/bin/python -m pip install --quiet uv==$(UV_VERSION)
	touch $@

# Made anew when its list changes: uv links from its cache, so that even vLLM's 6 GB take seconds the second time.
$(VENVS)/%/.locked: tests/environments/$$(or $$(LOCK_$$*),dev).txt | $(UV_STAMP)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	$(UV) pip install --quiet --python $(@D) --no-deps --requirement $<
	touch $@

# The package itself, editable. A stamp of its own, so that a new entry point doesn't reinstall torch.
$(VENVS)/%/.ready: $(VENVS)/%/.locked pyproject.toml otel_specdec/version.py
	$(UV) pip install --quiet --python $(@D) --no-deps --editable .
	touch $@

# Versions stay as they are unless a list needs others: UPGRADE=--upgrade takes the newest.
COMPILE = $(UV) pip compile --quiet --no-emit-index-url --custom-compile-command 'make lock' $(UPGRADE) \
	pyproject.toml --extra test

.PHONY: $(RELEASES:%=lock-%)
$(RELEASES:%=lock-%): lock-%: $(UV_STAMP)
	$(COMPILE) tests/environments/$*.in --python-version 3.11 --python-platform linux \
		--overrides tests/environments/vllm-$(or $(TORCH_$*),scheduler)-overrides.in \
		$(if $(TORCH_$*),,--excludes tests/environments/vllm-scheduler-excludes.in) \
		--output-file tests/environments/$*.txt

.PHONY: lock
lock: $(UV_STAMP) $(RELEASES:%=lock-%) ## Resolve tests/environments/*.in into *.txt (UPGRADE=--upgrade for the newest versions)
	$(COMPILE) --extra cli --extra demo --extra migrate tests/environments/dev.in --universal --python-version 3.10 \
		--output-file tests/environments/dev.txt
	$(COMPILE) --extra cli --extra migrate tests/environments/oldest.in --python-version 3.10 --python-platform linux \
		--output-file tests/environments/oldest.txt
	$(COMPILE) --extra cli --extra migrate tests/environments/middle.in --python-version 3.12 --python-platform linux \
		--output-file tests/environments/middle.txt
	$(COMPILE) --extra demo --extra migrate tests/environments/downstream.in --python-version 3.11 \
		--python-platform linux --output-file tests/environments/downstream.txt
	$(COMPILE) --extra demo --extra migrate tests/environments/docs.in --python-version 3.11 \
		--python-platform linux --output-file tests/environments/docs.txt
	$(COMPILE) tests/environments/ray.in --python-version 3.11 --python-platform linux \
		--output-file tests/environments/ray.txt
	$(COMPILE) --extra demo tests/environments/vllm.in --python-version 3.11 --python-platform linux \
		--overrides tests/environments/vllm-overrides.in --output-file tests/environments/vllm.txt
	$(COMPILE) --extra demo tests/environments/sglang.in --python-version 3.11 --python-platform x86_64-manylinux_2_34 \
		--overrides tests/environments/sglang-overrides.in --excludes tests/environments/sglang-excludes.in \
		--output-file tests/environments/sglang.txt

.PHONY: clean
clean: ## Remove environments, reports and caches (uv's own cache stays)
	rm -rf $(VENVS) build/reports dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find otel_specdec examples semconv tests -name __pycache__ -prune -exec rm -rf {} +
