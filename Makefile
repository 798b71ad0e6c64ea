# All tasks of developers and CI. Requires only a C++20 compiler, make and Python 3.11+.
#
#   make bench     builds and installs, then benchmarks fused against unfused calls, after checking them
#   make test      runs C++ tests, then Python tests; without GPUs the GPU tests are reported as skipped
#   make lint      runs the linters of CI              make format   fixes what the linters can fix
#   make test-engines  tests the plugins in serving engines, without GPUs; installs about 1 GB per engine
#   make sanitize  runs C++ tests under sanitizers     make wheel    builds dist/*.whl
#   make emulation runs kernels for AMD GPUs in the emulator: EMULATION_ARGS="seeds --seeds 300"
#   make amd       compiles all kernels for AMD GPUs with clang 22 and checks their machine code; takes minutes
#   make mutants   injects faults into the native sources, one at a time, and checks that tests fail
#   make docs      builds the site in build/site, with pages from docstrings, options and heads of files
#   make docs-version  commits the site of this version to the local branch gh-pages, and pushes nothing
#   make release   builds dist/*.whl for GPUs from SM 8.0 on and Linux with glibc 2.28+; takes minutes
#   make pictures  draws docs/pictures from stored results
#   make inplace   builds libraries into src/allnorm/lib, to run from the source tree
#   make clean     removes build results but keeps the virtual environment
#
# PYTHON=python3.12        interpreter; if it has torch, the environment shares its packages
# VENV=.venv               folder of the environment
# CUDA=auto|on|off         whether to build the CUDA library (auto: if nvcc is found)
# CUDA_ARCHS=auto          for example "80-real;90"
# ARCH=aarch64             `make release`: a wheel for this processor; `make test-cpp`: emulated by qemu-user.
#                          Both need g++-aarch64-linux-gnu
# HIP=on                   `make inplace` also builds the HIP library, a preview for AMD GPUs: docs/amd.md
# HIP_ARCHS=gfx942;gfx950  targets of its kernels
# WHEEL=allnorm-*.whl      wheel that `make install` installs instead of building one
# BENCH_ARGS=, PYTEST_ARGS=, MUTANTS_ARGS=, AMD_ARGS=  extra arguments; MUTANTS_ARGS="--part 1/32" runs a part
# ALLNORM_REPOSITORY=URL   repository that the site and the package's metadata link to
# VERSION=0.1.0, ALIAS=latest  of `make docs-version`; by default the package's version
# SANITIZERS=thread        sanitizers of `make sanitize`; SANITIZE_PART=2/4 runs a quarter of the tests

PYTHON ?= python3
VENV ?= .venv
CUDA ?= auto
CUDA_ARCHS ?= auto
HIP ?= off
HIP_ARCHS ?= gfx942;gfx950
WHEEL ?=
BENCH_ARGS ?=
PYTEST_ARGS ?= -m "not slow and not long"
MUTANTS_ARGS ?=
AMD_ARGS ?=
EMULATION_ARGS ?=
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/allnorm/_version.py)
ALIAS = latest
# Machine code per GPU generation, family-specific for 10 and 12 (for the e2m1 instruction), and PTX of
# 12.0 for later generations.
RELEASE_ARCHS := 80-real;90-real;100f-real;120f-real;120-virtual
RELEASE_GLIBC := 2.28

HOST_ARCH := $(shell uname -m)
ARCH ?= $(HOST_ARCH)
ifneq ($(ARCH),$(HOST_ARCH))
CROSS := $(ARCH)
endif

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
BUILD := build$(CROSS:%=/%)
DIST := dist
CTEST_ARGS := --output-on-failure --no-tests=error --parallel $(shell getconf _NPROCESSORS_ONLN)
export PATH := $(abspath $(BIN)):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE_SOURCES := $(shell find csrc cmake -type f 2>/dev/null) CMakeLists.txt
SOURCES := $(NATIVE_SOURCES) $(shell find src -name '*.py' -o -name '*.j2') pyproject.toml README.md
CXX_FILES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# Not -C, which needs pip 23.1; Python 3.11 ships pip 23.0.
PACKAGE_BUILD = $(BUILD)/package
PACKAGE_SETTINGS = --config-settings=build-dir=$(PACKAGE_BUILD) \
	--config-settings=cmake.define.ALLNORM_CUDA=$(CUDA) \
	'--config-settings=cmake.define.ALLNORM_CUDA_ARCHITECTURES=$(CUDA_ARCHS)'
TOOLCHAIN = $(CROSS:%=CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/%.cmake)
ifdef CROSS
CUDA_RUNTIME = $(BUILD)/cuda-runtime
PACKAGE_SETTINGS += --config-settings=cmake.define.$(TOOLCHAIN) \
	--config-settings=cmake.define.ALLNORM_CUDA_RUNTIME=$(abspath $(CUDA_RUNTIME)/nvidia/cu13/lib)
endif
# The variable is the platform in the wheel's tag.
MAKE_WHEEL = $(CROSS:%=_PYTHON_HOST_PLATFORM=linux-%) \
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps $(PACKAGE_SETTINGS)

.PHONY: bench test test-cpp test-python test-engines lint format sanitize mutants amd emulation docs docs-pages docs-version \
  pictures wheel release inplace install clean
.DELETE_ON_ERROR:

bench: $(STAMPS)/install
	$(BIN)/allnorm bench $(BENCH_ARGS)

test: test-cpp test-python

test-cpp: $(STAMPS)/run
	cmake -G Ninja -S . -B $(BUILD)/cpp-tests $(TOOLCHAIN:%=-D%) -DALLNORM_BUILD_TESTS=ON -DALLNORM_CUDA=off \
	  --log-level=WARNING
	cmake --build $(BUILD)/cpp-tests
	ctest --test-dir $(BUILD)/cpp-tests $(CTEST_ARGS)

test-python: $(STAMPS)/install $(STAMPS)/test
	$(BIN)/pytest $(PYTEST_ARGS)

# One environment per engine and version, on top of the development environment. It has the packages of
# tests/engines/ENGINE-VERSION.txt, installed without their dependencies.
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

amd: $(STAMPS)/run $(STAMPS)/test
	$(BIN)/python tests/native/amd/run.py $(AMD_ARGS)

emulation: $(STAMPS)/run $(STAMPS)/test
	$(BIN)/python tests/native/amd/emulator/run.py $(EMULATION_ARGS)

lint: $(STAMPS)/lint
	! git grep --line-number -E '^(<<<<<<<|>>>>>>>) ' # left by a merge
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-cache
	$(BIN)/python tools/file_table.py --check
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(STAMPS)/lint
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

docs: docs-pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The branch has a folder per version. Its first page leads to the latest.
docs-version: docs-pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --allow-empty --update-aliases $(VERSION) $(ALIAS)
	$(BIN)/mike set-default --allow-empty $(or $(ALIAS),$(VERSION))

docs-pages: $(STAMPS)/install $(STAMPS)/docs
	$(BIN)/python -P -m typer allnorm.cli.app utils docs --name allnorm --title "Command line" \
	  --output docs/reference/commands.md > /dev/null
	$(BIN)/python tools/file_table.py > docs/files.md
	for page in CHANGELOG CONTRIBUTING SECURITY; do \
	  sed -e 's|](docs/|](|g' -e 's|](CHANGELOG|](changelog|g' $$page.md > docs/$$(echo $$page | tr A-Z a-z).md || exit; done

pictures: $(STAMPS)/install $(STAMPS)/test
	$(BIN)/python benchmarks/pictures.py

install: $(STAMPS)/install

wheel: $(STAMPS)/run
	$(MAKE_WHEEL) -w $(DIST) .

release: override CUDA = on
release: override CUDA_ARCHS = $(RELEASE_ARCHS)
release: PACKAGE_BUILD = $(BUILD)/release/build
# auditwheel takes only tags of this machine's processor; for another one it finds the oldest glibc itself.
release: RELEASE_TAG = $(if $(CROSS),auto,manylinux_$(subst .,_,$(RELEASE_GLIBC))_$(ARCH))
release: $(STAMPS)/run $(STAMPS)/release $(CUDA_RUNTIME)
	rm -rf $(BUILD)/release/wheel
	$(MAKE_WHEEL) --config-settings=cmake.define.ALLNORM_GLIBC=$(RELEASE_GLIBC) -w $(BUILD)/release/wheel .
	$(BIN)/auditwheel repair --only-plat --plat $(RELEASE_TAG) -w $(DIST) $(BUILD)/release/wheel/*.whl

# nvcc compiles for all processors but comes with the runtime of this machine's.
$(BUILD)/cuda-runtime: | $(STAMPS)/run
	version=$$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'); \
	$(BIN)/pip install --quiet --target $@ --no-deps --only-binary=:all: \
	  $(foreach glibc,17 27 28,--platform manylinux_2_$(glibc)_$(ARCH)) "nvidia-cuda-runtime==$$version.*"

inplace: $(STAMPS)/test
	cmake -G Ninja -S . -B $(BUILD)/inplace -DALLNORM_CUDA=$(CUDA) '-DALLNORM_CUDA_ARCHITECTURES=$(CUDA_ARCHS)' \
	  -DALLNORM_HIP=$(HIP) '-DALLNORM_HIP_ARCHITECTURES=$(HIP_ARCHS)' --log-level=WARNING
	cmake --build $(BUILD)/inplace
	cmake --install $(BUILD)/inplace --component runtime --prefix src
	test '$(HIP)' != on || cmake --install $(BUILD)/inplace --component hip --prefix src

clean:
	rm -rf $(BUILD) $(DIST) $(STAMPS)/install
	rm -f src/allnorm/lib/*.so

# ---- Stamps: set up once, and again when a dependency has changed ------------------------------------------------

$(STAMPS)/run: pyproject.toml constraints.txt tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py $(VENV) build run
	@mkdir -p $(@D) && touch $@

$(STAMPS)/test $(STAMPS)/lint $(STAMPS)/docs $(STAMPS)/release: $(STAMPS)/%: $(STAMPS)/run
	$(PYTHON) tools/setup_venv.py $(VENV) $*
	@mkdir -p $(@D) && touch $@

# A changed setting requires a new package.
SETTINGS := $(CUDA) $(CUDA_ARCHS)
ifneq ($(SETTINGS),$(shell cat $(STAMPS)/settings 2>/dev/null))
.PHONY: $(STAMPS)/settings
endif
$(STAMPS)/settings: | $(STAMPS)/run
	@echo '$(SETTINGS)' > $@

$(STAMPS)/install: $(SOURCES) $(STAMPS)/run $(STAMPS)/settings
	@echo "building and installing allnorm; the first time takes minutes if nvcc is found"
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --force-reinstall $(PACKAGE_SETTINGS) $(or $(WHEEL),.)
	@touch $@
