# make quickstart | test | test-all | lint | clean. Each sets up .venv first, with any Python >= 3.12 it finds; PYTHON=/path/to/python overrides.
.PHONY: quickstart test test-all lint clean
.DELETE_ON_ERROR:

# Where a Python may live. A name on PATH can be a shim that only fails, so each candidate is tried before it is believed.
PLACES := $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python3 /usr/local/bin/python3.1[2-9] /opt/python*/bin/python3 /opt/python/*/bin/python3 \
  /opt/homebrew/bin/python3.1[2-9] /opt/conda/bin/python3 /opt/*conda*/bin/python3 /opt/*forge*/bin/python3 \
  $(HOME)/.local/bin/python3.1[2-9] $(HOME)/.local/share/uv/python/*/bin/python3 $(HOME)/*conda*/bin/python3 $(HOME)/*forge*/bin/python3 \
  $(HOME)/*conda*/envs/*/bin/python3 $(HOME)/*forge*/envs/*/bin/python3 $(HOME)/.asdf/installs/python/3.1[2-9]*/bin/python3 \
  $(HOME)/.local/share/mise/installs/python/3.1[2-9]*/bin/python3
CANDIDATES = $(or $(PYTHON),python3.13 python3.12 python3.14 python3 python $(wildcard $(PLACES)))

ifneq ($(shell cat .venv/.ready 2>/dev/null),$(CURDIR))
.PHONY: .venv/.ready  # the checkout was moved or copied, and .venv points at the old place
endif

.venv/.ready: setup.py
	@found=; half=; \
	for p in $(CANDIDATES); do \
	  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 || continue; \
	  if "$$p" -c 'import ensurepip, venv' >/dev/null 2>&1; then found=$$p; break; else half=$${half:-$$p}; fi; \
	done; \
	if [ -z "$$found" ] && [ -n "$$half" ]; then \
	  echo "error: $$half cannot make environments: install its venv package (Debian, Ubuntu: python3-venv), or pass PYTHON=/path/to/another" >&2; exit 1; fi; \
	if [ -z "$$found" ]; then \
	  echo "error: no working Python >= 3.12 in: $(or $(PYTHON),PATH and the usual places); install one (python.org, uv, conda), or pass PYTHON=/path/to/python" >&2; exit 1; fi; \
	if ! .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then \
	  echo "making .venv with $$found"; "$$found" -m venv --clear .venv; fi
	@echo "installing the requirements of setup.py into .venv (a minute or two)"
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-input -e '.[test,plots,hf]' || \
	  { echo "error: the requirements of setup.py could not be installed (above: why); set-up needs a package index once" >&2; exit 1; }
	@echo "$(CURDIR)" > $@

# The compilers of TPU and H200, which need no such device: beside .venv, since JAX would look for the devices wherever they are installed.
.aot/.ready: .venv/.ready setup.py
	@echo "installing the compilers of TPU and GPU into .aot (2 GB; a few minutes)"
	@.venv/bin/python -m venv --clear .aot
	@.aot/bin/python -m pip install -qq --disable-pip-version-check --no-input -e '.[aot]' || \
	  { rm -rf .aot; echo "error: the requirements of setup.py's extra aot could not be installed (above: why); Linux on x86-64 has them" >&2; exit 1; }
	@touch $@

quickstart: .venv/.ready
	@.venv/bin/python experiments/train.py --config=configs/quickstart.py --workdir=runs/quickstart
	@.venv/bin/python experiments/sweep.py --config=configs/sweeps/quickstart.py --workdir=runs/quickstart --out=runs/quickstart/nfe
	@.venv/bin/python experiments/plot.py --sweep=runs/quickstart/nfe --x=nfe --y=spelling --compare
	@echo "samples of a model that was trained for half an hour, release/lexicon_mini:"
	@.venv/bin/python experiments/sample.py --workdir=release/lexicon_mini --sampler=self_speculative --num=4 --option.window=constant \
	  --option.rate=8 --option.verification=block --out=runs/quickstart/release.jsonl

lint: .venv/.ready
	@.venv/bin/python -m ruff check --quiet .

test: lint
	@.venv/bin/python -m pytest -n auto --maxprocesses=4 --dist loadfile

test-all: lint
	@$(MAKE) --no-print-directory .aot/.ready || echo "going on without them: what needs them is skipped"
	@.venv/bin/python -m pytest -n auto --maxprocesses=4 --dist loadfile -m ''

clean:
	rm -rf .venv .aot .cache .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
