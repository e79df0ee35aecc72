# make build | test | test-slow | torches | demo | examples | check | wheel | docs | sanitize |
#      gpu-bundle | clean
#
# PYTHON=python3; ARGS="..." goes to the tests or the demo.
# PYTHON's torch is used where it has one; otherwise .venv is made, with the CPU build of torch
# where there is no nvidia-smi. Tests run in two processes of one thread each.
# Needed: Python >= 3.10, a C++ compiler and make.
PYTHON ?= python3
PREPARE := $(PYTHON) build_backend/jachess_build/prepare.py
RUN := $$(cat build/python)
WHEEL := $(RUN) -m pip wheel -q --no-build-isolation --no-deps --disable-pip-version-check -w dist .
SOURCES := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu)
LINTED := setup.py noxfile.py build_backend jachess_ext python_tests examples benchmarks

.PHONY: build test test-slow torches demo examples check wheel docs sanitize gpu-bundle clean

build:
	@$(PREPARE) build
	@echo "built for $(RUN)"

test:
	@$(PREPARE) test
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		python_tests -m "not slow and not sanitizers" $(ARGS)

# All that `make test` leaves out, by part: make test-slow ARGS="--part 3/12".
test-slow:
	@$(PREPARE) test
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		python_tests -m "slow" $(ARGS)

# What leans on torch's inner workings, under the newest and the oldest torch.
torches:
	@$(PREPARE) test
	@PYTHONPATH=build_backend $(RUN) -m jachess_build.torches

demo:
	@$(PREPARE) demo
	@$(RUN) -m jachess_ext demo $(ARGS)

# Each example for a few steps.
examples:
	@$(PREPARE) examples
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN) examples/run_all.py $(ARGS)

# ARCHS="9.0a": the CUDA kernels' registers on these architectures alone.
check:
	@$(PREPARE) check
	@$(RUN) -m ruff check $(LINTED)
	@$(RUN) -m ruff format --check $(LINTED)
	@$(RUN) -m mypy
	@$(RUN) -c 'import clang_format, sys; clang_format.clang_format()' \
		--dry-run -Werror $(SOURCES)
	@PYTHONPATH=build_backend $(RUN) -m jachess_build.spills $(ARCHS)

# dist/ gets the wheel for $(PYTHON)'s version and this platform, which serves every torch from 2.10
# on, and one without compiled operators, which installs anywhere.
wheel:
	@$(PREPARE) build
	@rm -rf build/lib* build/bdist* dist
	@$(WHEEL)
	@rm -rf build/lib*
	@JACHESS_SKIP_EXTENSIONS=1 $(WHEEL)
	@ls -sh dist

# The site, into build/site; a warning or a dead link stops it.
docs:
	@$(PREPARE) docs
	@# With -q, mkdocs --strict passes whatever it warns of.
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@SITE=build/site $(RUN) -m pytest -q -p no:cacheprovider -m slow python_tests/packaging/test_site.py
	@echo "build/site/index.html"

# The operators with address, undefined-behaviour and thread sanitizers: CPU, and CUDA in the shim.
# ARGS=--if-changed: only where csrc or its tests are not those of csrc/sanitized.txt.
sanitize:
	@$(PREPARE) test
	@PYTHONPATH=build_backend $(RUN) -m jachess_build.sanitized $(ARGS)

# What travels to a rented GPU, into build/gpu-bundle: see benchmarks/gpu_bundle.py.
gpu-bundle:
	@$(PREPARE) test
	@$(RUN) -m benchmarks.gpu_bundle $(ARGS)

# .venv stays: it is made anew only where it is broken.
clean:
	rm -rf build dist *.egg-info jachess_ext/_C*.so jachess_ext/_ops*.so
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
