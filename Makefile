# Sets itself up: the first target makes .venv and installs the package there; later ones start at once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# A file is compiled when it is first imported: most of what is installed never is.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
LOWEST := .venv-lowest
NEWEST := .venv-newest
IN_PARALLEL := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
FLOWER := .venv-flower$(addprefix -,$(FLOWER_VERSION))
NVFLARE := .venv-nvflare
TRL := .venv-trl$(addprefix -,$(TRL_VERSION))
DEEPSPEED := .venv-deepspeed
QUANTIZED := .venv-quantized
LOGGERS := .venv-loggers
# Those of tests/ that hold slow tests: the others need not be collected to run these. The longest come first, so that
# no process waits for one at the end.
LONGEST := tests/test_examples.py tests/engine/channels/test_entities.py tests/trainers/test_fsdp2.py tests/docs/test_python.py
SLOW = $(LONGEST) $(filter-out $(LONGEST),$(sort $(shell grep -rl --include='test_*.py' 'mark\.slow' tests)))
PAPERS_LOG ?= benchmarks/papers/measured.jsonl

# An environment that begins with all that .venv holds: only what differs from it is installed there.
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
BESIDE = @$(BIN)/python -m venv $(1) && \
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > "$$($(1)/bin/python $(SITE))/beside.pth"

# Each file is compiled once, not by each of some 200 processes.
unexport PYTHONDONTWRITEBYTECODE

# An environment that is there keeps its Python: one of another version needs another name.
ifeq ($(origin PYTHON),command line)
  VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
  ASKED   := $(shell $(PYTHON) $(VERSION) 2>/dev/null)
  THERE   := $(if $(wildcard $(READY)),$(shell $(BIN)/python $(VERSION)),$(ASKED))
  ifneq ($(filter-out $(THERE),$(ASKED)),)
    $(error $(VENV) has Python $(THERE), and PYTHON=$(PYTHON) is $(ASKED). Name an environment for it: VENV=.venv-$(ASKED))
  endif
endif

.PHONY: help demo test test-slow test-all test-lowest test-newest test-flower test-nvflare test-trl test-deepspeed test-quantized test-loggers coverage docs notebooks smoke papers gpu lint metrics clean install install-all
.DEFAULT_GOAL := help

help:
	@echo "make demo    fine-tune a small model on private messages and watch them leak (no network needed once installed)"
	@echo "make test    run the tests"
	@echo "make test-slow  run the slow ones: proofs of DP-SGD and of gates, most runs on several processes, torch.compile, real models, the examples, and the snippets of the docs"
	@echo "make test-all  run both in one go, which is faster than one after the other"
	@echo "make test-lowest  run the tests with the oldest versions that pyproject.toml allows, in .venv-lowest"
	@echo "make test-newest  run the tests with the newest versions that there are, whatever bounds say, in .venv-newest, and list what broke"
	@echo "make test-flower  run the tests of federations on Flower, in .venv-flower (the oldest: FLOWER_VERSION=1.41.0, in an environment of its own)"
	@echo "make test-nvflare  run the tests of federations on NVFlare, in .venv-nvflare"
	@echo "make test-quantized  run the tests of LoRA on bases in 4 and 8 bits, with bitsandbytes and torchao in .venv-quantized"
	@echo "make test-trl  run the tests of TRL's trainers, and their example, in .venv-trl (the oldest: TRL_VERSION=1.0.0)"
	@echo "make test-deepspeed  run the tests of DeepSpeed's ZeRO, on two processes, in .venv-deepspeed"
	@echo "make test-loggers  run the tests of W&B, MLflow and Trackio, offline, in .venv-loggers"
	@echo "make coverage  run the tests, but for the slow ones, and print which share of the package's lines they run (takes two thirds longer)"
	@echo "make notebooks  execute and check the notebooks of examples/notebooks/"
	@echo "make docs    build the site of docs/ in site/, strictly; open site/index.html"
	@echo "make smoke   run every script of benchmarks/, and some examples, in their smallest setting (some minutes)"
	@echo "make papers  every table and figure of docs/papers.md that was not measured yet: ENCODER=DIR STORIES=DIR are models, CAUSAL=DIR adds Figs. 1 and 2 of inversion on a larger one (all anew with PAPERS_LOG=FILE: about two hours of two cores)"
	@echo "make gpu     write what the monitor and DP-SGD cost on one CUDA card into docs/what_ran.md"
	@echo "make lint    ruff and mypy"
	@echo "make metrics count lines, imports, arguments, names and docstrings of the package; where they stand: ARGS=\"--list names lightning_fedleak/evaluation/games\""
	@echo "make clean   remove .venv, .venv-* and caches (fedleak_runs/ stays)"
	@echo "PYTHON=python3.13 VENV=.venv-3.13 with another Python, in an environment of its own"
	@echo "ARGS=\"...\" goes to the command: make demo ARGS=\"--steps 50\", make test ARGS=\"-k gate\""

demo: $(READY)
	@$(BIN)/fedleak demo $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -m "not slow" $(IN_PARALLEL) $(ARGS)

test-slow: $(READY)
	@$(BIN)/python -m pytest -m slow $(IN_PARALLEL) $(or $(ARGS),$(SLOW))

test-all: $(READY)  # both at once: all is imported and collected once
	@$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

# In an environment of its own: Flower wants older packages. What needs no Flower, tests/federation, is
# in `make test`. Slow are the apps of examples/flower: ARGS="-m slow".
test-flower: $(FLOWER)/.ready
	@FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 RAY_USAGE_STATS_ENABLED=0 PYTHONPATH=. \
		$(FLOWER)/bin/python -m pytest --numprocesses 0 -m "not slow" tests/flower $(ARGS)

# Beside the environment, not in it, which needs no web server and no database.
test-nvflare: $(READY) $(NVFLARE)/.ready
	@PYTHONPATH=$(NVFLARE):. $(BIN)/python -m pytest --numprocesses 0 tests/nvflare $(ARGS)

# Beside the environment, not in it: PEFT imports bitsandbytes wherever it is installed.
test-quantized: $(READY) $(QUANTIZED)/.ready
	@PYTHONPATH=$(QUANTIZED):. $(BIN)/python -m pytest --numprocesses 0 tests/engine/test_quantized_bases.py \
		tests/defenses/dpsgd/test_quantized_bases.py \
		"tests/engine/test_matrix.py::test_what_is_logged_is_true[LoRA, NF4]" \
		"tests/engine/test_matrix.py::test_what_is_logged_is_true[LoRA, int8]" \
		tests/engine/channels/test_memorization.py::test_a_base_of_four_bits_reads_as_its_dequantized_weights_do $(ARGS)

# In an environment of its own: others are tested without its datasets and pyarrow.
test-trl: $(TRL)/.ready
	@PYTHONPATH=. $(TRL)/bin/python -m pytest --numprocesses 0 tests/trl $(ARGS)

# In an environment of its own: transformers and accelerate import DeepSpeed wherever it is installed.
test-deepspeed: $(DEEPSPEED)/.ready
	@PYTHONPATH=. $(DEEPSPEED)/bin/python -m pytest --numprocesses 0 tests/deepspeed $(ARGS)

# In an environment of its own: MLflow wants older packages than some of .venv.
test-loggers: $(LOGGERS)/.ready
	@PYTHONPATH=. $(LOGGERS)/bin/python -m pytest --numprocesses 0 tests/loggers $(ARGS)

test-lowest: $(LOWEST)/.ready  # without real models: newer versions saved their tokenizers
	@FEDLEAK_ASSETS=none $(LOWEST)/bin/python -m pytest $(IN_PARALLEL) $(ARGS)

# The installed versions, then each test that failed in a line. It may fail through no fault of this package.
test-newest: $(NEWEST)/.ready
	@$(NEWEST)/bin/python -m pip freeze --exclude-editable
	@FEDLEAK_ASSETS=none $(NEWEST)/bin/python -m pytest $(IN_PARALLEL) -m "not slow" --tb=line -rfE $(ARGS)

coverage: $(READY)
	@$(BIN)/python $(INSTALL) -c constraints.txt pytest-cov
	@$(BIN)/python -m pytest -m "not slow" $(IN_PARALLEL) --cov=lightning_fedleak --cov-report=term:skip-covered $(ARGS)

notebooks: $(VENV)/.docs
	@$(BIN)/python examples/notebooks/run.py $(ARGS)

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

$(VENV)/.docs: $(READY)
	@$(BIN)/python $(INSTALL) -c constraints.txt -e ".[docs,notebooks]"
	@touch $@

smoke: $(READY)
	@$(BIN)/python -m benchmarks.smoke $(ARGS)

papers: $(READY)  # goes on where it was stopped; a table that fails stops none
	@test -n "$(ENCODER)" -a -n "$(STORIES)" || { echo "Name folders of two models: make papers ENCODER=DIR STORIES=DIR"; exit 1; }
	@failed=0; run="$(BIN)/python -m benchmarks.papers --log $(PAPERS_LOG)"; \
	$$run membership --model $(ENCODER) $(STORIES) --jobs 2 $(ARGS) || failed=1; \
	$$run inversion --model $(STORIES) $(CAUSAL) --jobs 2 $(ARGS) || failed=1; \
	$$run flatchat --model $(STORIES) --jobs 2 $(ARGS) || failed=1; \
	$$run --docs benchmarks/papers/README.md $(ARGS) || failed=1; exit $$failed

gpu: $(READY)
	@$(BIN)/python -m benchmarks.cost.gpu $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

metrics: $(READY)
	@$(BIN)/python -m tests.tools.code_metrics $(ARGS)

install: $(READY)

install-all: $(READY) $(VENV)/.docs  # one after the other: both write to one environment

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "No '$(PYTHON)' here. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "lightning-fedleak needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name a newer one: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "Python could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV) (once; some minutes) ..."
	@$(BIN)/python $(INSTALL) -c constraints.txt -e ".[dev,demo]"
	@touch $@

$(LOWEST)/.ready: pyproject.toml constraints.txt tests/tools/lowest_versions.py
	@rm -rf $(LOWEST)
	@$(PYTHON) -m venv $(LOWEST)
	@$(PYTHON) tests/tools/lowest_versions.py test datasets > $(LOWEST)/constraints.txt
	@echo "Installing the oldest versions into $(LOWEST) (once; some minutes) ..."
	@$(LOWEST)/bin/python $(INSTALL) -c $(LOWEST)/constraints.txt -e ".[test,datasets]"
	@touch $@

$(NEWEST)/.ready: pyproject.toml tests/tools/lowest_versions.py
	@rm -rf $(NEWEST)
	@$(PYTHON) -m venv $(NEWEST)
	@$(PYTHON) tests/tools/lowest_versions.py --names test datasets > $(NEWEST)/names.txt
	@echo "Installing the newest versions into $(NEWEST) (once; some minutes) ..."
	@$(NEWEST)/bin/python $(INSTALL) --upgrade -r $(NEWEST)/names.txt
	@$(NEWEST)/bin/python $(INSTALL) --no-deps -e .
	@touch $@

$(FLOWER)/.ready: $(READY) constraints-flower.txt
	$(call BESIDE,$(FLOWER))
	@echo "Installing Flower into $(FLOWER) (once; some minutes) ..."
	@grep -vE '$(if $(FLOWER_VERSION),^(flwr|certifi|uv)==,^$$)' constraints-flower.txt > $(FLOWER)/constraints.txt
	@$(FLOWER)/bin/python $(INSTALL) -c $(FLOWER)/constraints.txt -e ".[flower,test]" "flwr$(addprefix ==,$(FLOWER_VERSION))"
	@touch $@

$(NVFLARE)/.ready: $(READY) constraints-nvflare.txt
	@$(BIN)/python $(INSTALL) --no-deps --target $(NVFLARE) --upgrade -r constraints-nvflare.txt
	@touch $@

$(QUANTIZED)/.ready: $(READY)
	@$(BIN)/python $(INSTALL) --no-deps --target $(QUANTIZED) --upgrade -c constraints.txt bitsandbytes torchao
	@touch $@

$(LOGGERS)/.ready: $(READY) constraints-loggers.txt
	$(call BESIDE,$(LOGGERS))
	@$(LOGGERS)/bin/python $(INSTALL) -c constraints-loggers.txt wandb mlflow-skinny sqlalchemy alembic trackio
	@touch $@

$(TRL)/.ready: $(READY) constraints-trl.txt
	$(call BESIDE,$(TRL))
	@echo "Installing TRL into $(TRL) (once; some minutes) ..."
	@grep -vE '$(if $(TRL_VERSION),^trl==,^$$)' constraints-trl.txt > $(TRL)/constraints.txt
	@$(TRL)/bin/python $(INSTALL) -c constraints.txt -c $(TRL)/constraints.txt -e ".[test]" "trl$(addprefix ==,$(TRL_VERSION))"
	@touch $@

# It is built without its operators, of which the tests use none.
$(DEEPSPEED)/.ready: $(READY) constraints-deepspeed.txt
	$(call BESIDE,$(DEEPSPEED))
	@echo "Installing DeepSpeed into $(DEEPSPEED) (once; a minute) ..."
	@$(DEEPSPEED)/bin/python $(INSTALL) wheel "setuptools>=77,<80"
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(DEEPSPEED)/bin/python $(INSTALL) --no-build-isolation \
		-c constraints.txt -c constraints-deepspeed.txt deepspeed
	@touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
