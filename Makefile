# make demo | train | test | bench | gpu-report | nvcc-check | cuda-check | lint | format: each sets up
# what it needs, on a fresh machine too.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEPENDENCIES := $(VENV)/.dependencies
BUILT := $(VENV)/.built
DATA ?= sotu
OUT ?= runs/$(notdir $(patsubst %/,%,$(DATA)))
CPP := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
EMU := $(shell find tests/emu -name '*.h' -o -name '*.cpp' -o -name '*.cuh')
PY := fused_recoder bench tests tools examples setup.py

.PHONY: demo train test bench gpu-report nvcc-check cuda-check lint format clean

demo: $(BUILT)
	$(BIN)/python examples/demo.py

train: $(BUILT)
	$(BIN)/fused-recoder train $(DATA) --out $(OUT) --resume $(FLAGS)

test: $(BUILT)
	$(BIN)/python -m pytest -n 2 --durations=15

bench: $(BUILT)
	$(BIN)/python -m bench

# Builds by itself: a failing build is part of the report.
gpu-report: $(DEPENDENCIES)
	$(BIN)/python -m tools.gpu_report

nvcc-check: $(DEPENDENCIES)
	$(BIN)/python -m tools.nvcc_check

# Downloads about 5 GB once; see tools/cuda_check.py.
cuda-check:
	$(PYTHON) -m tools.cuda_check

lint: $(DEPENDENCIES)
	$(BIN)/ruff check $(PY)
	$(BIN)/ruff format --check $(PY)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP) $(EMU)

format: $(DEPENDENCIES)
	$(BIN)/ruff check --fix $(PY)
	$(BIN)/ruff format $(PY)
	$(BIN)/clang-format -i $(CPP) $(EMU)

$(DEPENDENCIES): requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

$(BUILT): $(DEPENDENCIES) setup.py pyproject.toml $(CPP)
	$(BIN)/python -m pip install --no-build-isolation --no-deps --quiet -e .
	$(BIN)/python -m fused_recoder env
	touch $@

clean:
	rm -rf build dist *.egg-info fused_recoder/*.so $(BUILT)
