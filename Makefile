# Everything a developer or CI does. Nothing needs to be installed by hand: a C++20 compiler, make and Python 3.11+ do.
#
#   make bench     build, then time the fused op beside the unfused one, every shape checked first
#   make test      C++ tests, then Python tests; GPU tests are skipped, visibly, where there are no GPUs
#   make lint      the checks that CI makes            make format   repairs what can be repaired
#   make test-engines  the plugins in the packages of serving engines, without GPUs; about 1 GB each to install
#   make sanitize  C++ tests under sanitizers          make wheel    dist/*.whl
#   make mutants   faults switched on in the native sources, one at a time, which the tests must report
#   make docs      the site, build/site: strict, with the references made from docstrings and options
#   make release   dist/*.whl for all GPUs from 8.0 on and every Linux with glibc 2.28; minutes of nvcc
#   make pictures  docs/pictures, from stored rows
#   make inplace   libraries into src/allnorm/lib, to run from the source tree
#   make clean     removes what was built; the virtual environment stays
#
# PYTHON=python3.12        interpreter; one that has torch already lends its packages to the environment
# VENV=.venv               where that environment is
# CUDA=auto|on|off         whether to build the CUDA library (auto: where nvcc is found)
# CUDA_ARCHS=auto          for example "80-real;90"
# WHEEL=allnorm-*.whl      what `make install` installs instead of building it
# BENCH_ARGS=, PYTEST_ARGS=, MUTANTS_ARGS=  passed on; MUTANTS_ARGS="--part 1/32" for some faults
# SANITIZERS=thread        one of those of `make sanitize`; SANITIZE_PART=2/4: a quarter of its tests

PYTHON ?= python3
VENV ?= .venv
CUDA ?= auto
CUDA_ARCHS ?= auto
WHEEL ?=
BENCH_ARGS ?=
PYTEST_ARGS ?= -m "not slow and not long"
MUTANTS_ARGS ?=
# Each generation's own code, of 10 and 12 with what all of their family have (e2m1 is an
# instruction there), and 12.0 for those to come.
RELEASE_ARCHS := 80-real;90-real;100f-real;120f-real;120-virtual
RELEASE_GLIBC := 2.28

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
BUILD := build
DIST := dist
CTEST_ARGS := --output-on-failure --no-tests=error --parallel $(shell getconf _NPROCESSORS_ONLN)
export PATH := $(abspath $(BIN)):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE_SOURCES := $(shell find csrc cmake -type f 2>/dev/null) CMakeLists.txt
SOURCES := $(NATIVE_SOURCES) $(shell find src -name '*.py' -o -name '*.j2') pyproject.toml README.md
CXX_FILES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# Not -C, which pip has from 23.1 on; Python 3.11 brings 23.0.
PACKAGE_BUILD = $(BUILD)/package
PACKAGE_SETTINGS = --config-settings=build-dir=$(PACKAGE_BUILD) \
	--config-settings=cmake.define.ALLNORM_CUDA=$(CUDA) \
	'--config-settings=cmake.define.ALLNORM_CUDA_ARCHITECTURES=$(CUDA_ARCHS)'

.PHONY: bench test test-cpp test-python test-engines lint format sanitize mutants docs pictures wheel release inplace \
  install clean
.DELETE_ON_ERROR:

bench: $(STAMPS)/install
	$(BIN)/allnorm bench $(BENCH_ARGS)

test: test-cpp test-python

test-cpp: $(STAMPS)/run
	cmake -G Ninja -S . -B $(BUILD)/cpp-tests -DALLNORM_BUILD_TESTS=ON -DALLNORM_CUDA=off --log-level=WARNING
	cmake --build $(BUILD)/cpp-tests
	ctest --test-dir $(BUILD)/cpp-tests $(CTEST_ARGS)

test-python: $(STAMPS)/install $(STAMPS)/test
	$(BIN)/pytest $(PYTEST_ARGS)

# One environment for each engine and version, on top of the one for development: tests/engines/ENGINE-VERSION.txt
# names its packages, which are installed without what they depend on.
ENGINES ?= $(basename $(notdir $(wildcard tests/engines/*.txt)))

test-engines: $(ENGINES:%=test-engine-%)
.PRECIOUS: $(BUILD)/engines/%/installed

test-engine-%: $(BUILD)/engines/%/installed $(STAMPS)/install $(STAMPS)/test
	$(BUILD)/engines/$*/bin/python -P -m pytest tests/engines/test_$(firstword $(subst -, ,$*))*.py

$(BUILD)/engines/%/installed: tests/engines/%.txt | $(STAMPS)/test
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
	$(@D)/bin/pip install --quiet --no-deps -r $<
	@touch $@

SANITIZERS ?= address,undefined thread
SANITIZE_PART ?=

sanitize: $(STAMPS)/run
	set -e; for s in $(SANITIZERS); do \
	  b=$(BUILD)/sanitize-$${s%%,*}; \
	  cmake -G Ninja -S . -B $$b -DALLNORM_BUILD_TESTS=ON -DALLNORM_CUDA=off -DALLNORM_SANITIZE=$$s \
	    -DALLNORM_TEST_PART=$(SANITIZE_PART) --log-level=WARNING; \
	  cmake --build $$b; \
	  ctest --test-dir $$b $(CTEST_ARGS); \
	done

mutants: $(STAMPS)/run
	$(BIN)/python tests/native/kernel_mutants/run.py $(MUTANTS_ARGS)

lint: $(STAMPS)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(STAMPS)/lint
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

docs: $(STAMPS)/install $(STAMPS)/docs
	$(BIN)/python -P -m typer allnorm.cli.app utils docs --name allnorm --title "Command line" \
	  --output docs/reference/commands.md > /dev/null
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

pictures: $(STAMPS)/install $(STAMPS)/test
	$(BIN)/python benchmarks/pictures.py

install: $(STAMPS)/install

wheel: $(STAMPS)/run
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps $(PACKAGE_SETTINGS) -w $(DIST) .

release: override CUDA = on
release: override CUDA_ARCHS = $(RELEASE_ARCHS)
release: PACKAGE_BUILD = $(BUILD)/release/build
release: $(STAMPS)/run $(STAMPS)/release
	rm -rf $(BUILD)/release/wheel
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps $(PACKAGE_SETTINGS) \
	  --config-settings=cmake.define.ALLNORM_GLIBC=$(RELEASE_GLIBC) -w $(BUILD)/release/wheel .
	$(BIN)/auditwheel repair --only-plat --plat manylinux_$(subst .,_,$(RELEASE_GLIBC))_$(shell uname -m) \
	  -w $(DIST) $(BUILD)/release/wheel/*.whl

inplace: $(STAMPS)/run
	cmake -G Ninja -S . -B $(BUILD)/inplace -DALLNORM_CUDA=$(CUDA) '-DALLNORM_CUDA_ARCHITECTURES=$(CUDA_ARCHS)' \
	  --log-level=WARNING
	cmake --build $(BUILD)/inplace
	cmake --install $(BUILD)/inplace --component runtime --prefix src

clean:
	rm -rf $(BUILD) $(DIST) $(STAMPS)/install
	rm -f src/allnorm/lib/*.so

# ---- What is set up once, and again when what it depends on has changed ------------------------------------------

$(STAMPS)/run: pyproject.toml constraints.txt tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py $(VENV) build run
	@mkdir -p $(@D) && touch $@

$(STAMPS)/test $(STAMPS)/lint $(STAMPS)/docs $(STAMPS)/release: $(STAMPS)/%: $(STAMPS)/run
	$(PYTHON) tools/setup_venv.py $(VENV) $*
	@mkdir -p $(@D) && touch $@

# A changed setting is a changed package.
SETTINGS := $(CUDA) $(CUDA_ARCHS)
ifneq ($(SETTINGS),$(shell cat $(STAMPS)/settings 2>/dev/null))
.PHONY: $(STAMPS)/settings
endif
$(STAMPS)/settings: | $(STAMPS)/run
	@echo '$(SETTINGS)' > $@

$(STAMPS)/install: $(SOURCES) $(STAMPS)/run $(STAMPS)/settings
	@echo "building and installing allnorm; the first time takes minutes where nvcc is found"
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --force-reinstall $(PACKAGE_SETTINGS) $(or $(WHEEL),.)
	@touch $@
