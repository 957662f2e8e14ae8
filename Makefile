# Everything a fresh machine needs. `make demo` installs the library into .venv, `make test` also what the tests need;
# both skip what is done.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Compiled modules are kept, also where the shell says otherwise: the tests start many processes that import them again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo docs test test-variations test-slow test-oldest test-newest test-gpu style lint bench clean help

help:           ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --progress-bar off -c constraints.txt torch==2.13.0 -e '.[dev]'
	touch .venv/installed-library $@

.venv/installed-library: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --progress-bar off -c constraints.txt torch==2.13.0 -e .
	touch $@

.venv/installed-bench: .venv/installed
	$(PIP) install --quiet --progress-bar off -c constraints.txt -e '.[dev,bench]'
	touch $@

demo: .venv/installed-library   ## fine-tune a real pretrained model on real text
	$(BIN)/trimtab demo

# mypy uses one core for a minute, and the tests leave some of the time of each core unused: they run at the same time.
test: .venv/installed style ## style, types, and the quick tests
	report="$$(mktemp)"; $(BIN)/mypy >"$$report" 2>&1 & types=$$!; \
	$(BIN)/python -m pytest; tests=$$?; \
	wait $$types; types=$$?; cat "$$report"; rm "$$report"; exit $$((tests ? tests : types))

# Products that are summed in other orders (tests/product_order.py), and other vector instructions.
ORDERS := 1 2 3
test-variations: .venv/installed        ## the quick tests as other processors would round; ORDERS=2 tries one of three
	for order in $(ORDERS); do \
		echo "PRODUCT_ORDER=$$order"; PRODUCT_ORDER=$$order $(BIN)/python -m pytest || exit 1; \
	done
	sets="$$($(BIN)/python tests/cpu_capabilities.py)" && echo "$$sets" | while read -r variables; do \
		echo "$$variables"; \
		env $$variables $(BIN)/python -m pytest tests/numerics tests/optim tests/parity tests/resume </dev/null || exit 1; \
	done

test-slow: .venv/installed      ## the tests that take longer: documentation commands, kills, full disks, servers
	$(BIN)/python -m pytest -m 'slow and not gpu'

# Environments on top of .venv: pip installs there only what differs. MODELS is what depends on these libraries.
MODELS := tests/planner tests/model tests/optim tests/hardware
define on-top-of-venv
	test -x $@/bin/python || $(BIN)/python -m venv --without-pip $@
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $$($@/bin/python -c "import site; print(site.getsitepackages()[0])")/on-top.pth
	$@/bin/python -m pip --disable-pip-version-check install --quiet --progress-bar off --no-warn-conflicts
endef

.venv-oldest: .venv/installed
	$(on-top-of-venv) $$($(BIN)/python tests/oldest_versions.py)
	touch $@

.venv-newest: .venv/installed
	$(on-top-of-venv) --upgrade transformers peft
	touch $@

test-oldest: .venv-oldest       ## tests of models with the oldest transformers and peft that pyproject.toml allows
	$</bin/python -m pytest $(MODELS)

test-newest: .venv-newest       ## the same with the newest that pip finds
	$</bin/python -m pytest $(MODELS)

# One process for each file: what the allocator keeps of one file would be in the figures of the next.
test-gpu: .venv/installed       ## the tests that need an NVIDIA GPU, and the tutorials on it
	for file in tests/gpu/test_*.py; do $(BIN)/python -m pytest -n 0 -m gpu $$file || exit 1; done
	$(BIN)/python -m pytest -n 4 --dist load -m slow tests/docs/test_tutorials.py

docs: .venv/installed   ## the documentation site, in build/site; broken links are errors
	$(BIN)/python docs/site/build_site.py

style: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style     ## style and types
	$(BIN)/mypy

bench: .venv/installed-bench    ## the overhead table of docs/overhead.md, measured here
	$(BIN)/python benchmarks/overhead.py

clean:          ## forget the virtual environment
	rm -rf .venv .venv-oldest .venv-newest
