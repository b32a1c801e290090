# Two commands matter: `make demo` and `make test`. Each sets up everything it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin

.PHONY: demo demo-clean test test-oldest lint bench campaign soak deb deb-tree clean
.DELETE_ON_ERROR:

$(VENV)/.done: pyproject.toml packaging/constraints.txt
	@echo "making $(VENV): torch and what stands on it, about 1 GB; this takes a minute or two"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c packaging/constraints.txt -e '.[dev,demo]'
	@touch $@

# Seven real jobs train in turn on this machine's CPUs, and then an adapter on what one of them has made. Interrupted, it goes on where it was; `make demo-clean` forgets.
# The result is shown even when a job failed; make's exit code is then that of `rrd run`.
DEMO = .demo
demo: $(VENV)/.done
	@$(BIN)/python packaging/demo/fetch.py $(DEMO)
	@$(BIN)/python packaging/demo/earlier.py $(DEMO)
	@$(BIN)/python packaging/demo/jobs.py $(DEMO)
	@$(BIN)/rrd run --config $(DEMO)/jobs.d --state $(DEMO)/state && \
	$(BIN)/python packaging/demo/jobs.py $(DEMO) && \
	$(BIN)/rrd run --config $(DEMO)/jobs.d --state $(DEMO)/state; code=$$?; \
	$(BIN)/python packaging/demo/finish.py $(DEMO) --check && exit $$code

demo-clean:
	rm -rf $(DEMO)

# The figures of docs/benchmarks.md. An hour or more; the box should have nothing else to do.
bench: $(VENV)/.done
	@for b in daemon rotation aggregate train int8 rwkv tokenize gate; do $(BIN)/python tests/bench/bench_$$b.py || exit 1; done

# Everything: lint, types, floors, tests. One thread each: the tests bring their own side-by-side.
TESTS ?= tests
test: $(VENV)/.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' $(TESTS)

# The torch side with the oldest torch there is for it (the last that runs on K80s), in an environment of its own, 4 GB.
OLDEST  ?= .venv-oldest
OLD_PYTHON ?= python3.11
TORCH_SIDE = tests/ops tests/models tests/train tests/worker tests/test_lora.py tests/test_adamw.py tests/test_exact.py \
	tests/test_rwkv_run.py tests/test_bridge_run.py
$(OLDEST)/.done: pyproject.toml packaging/constraints-oldest.txt
	@echo "making $(OLDEST): torch 2.0.1 with its CUDA 11.7, about 4 GB; this takes a few minutes"
	@$(OLD_PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -c packaging/constraints-oldest.txt -e '.[hf]' \
		numpy peft rwkv pytest pytest-timeout hypothesis pyyaml
	@touch $@

test-oldest: $(OLDEST)/.done
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -m 'not slow' -p no:cacheprovider $(TORCH_SIDE)

lint: $(VENV)/.done
	$(BIN)/ruff check .
	$(BIN)/mypy rrd

# The long half: a thousand kills, every power cut, ten thousand damaged bytes; then the tests marked slow. Two to
# three hours. `ARGS="--kills 100 --only kills"` for a part of it; docs/reliability.md says what it does.
campaign: $(VENV)/.done
	OMP_NUM_THREADS=1 $(BIN)/python tests/campaign/campaign.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 7200 -s $(TESTS)

# A Debian package, by debhelper (apt-get install debhelper): build/rrd_VERSION_all.deb. What wants Python is made first.
BUILD ?= build
DEB    = $(BUILD)/deb/rrd
deb-tree:
	rm -rf $(BUILD)/deb && mkdir -p $(DEB)/completion
	cp -a pyproject.toml README.md CHANGELOG.md LICENSE rrd kernels units etc docs packaging $(DEB)
	cp -a packaging/debian $(DEB)/debian && cp packaging/completion/rrd.bash $(DEB)/completion/rrd
	find $(DEB) -name __pycache__ -prune -exec rm -rf {} +

deb: $(VENV)/.done deb-tree
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w $(DEB)/wheel $(DEB)
	$(BIN)/python -m rrd.cli.manual $(DEB)/man packaging/bin/rrd-setup && rm -rf $(DEB)/build $(DEB)/*.egg-info
	cd $(DEB) && dpkg-buildpackage --build=binary --no-sign >../build.log 2>&1 || { tail -30 ../build.log; exit 1; }
	mv $(BUILD)/deb/*.deb $(BUILD)/ && ls $(BUILD)/*.deb

# Twelve jobs among all faults, for MINUTES; memory and open files are watched.
MINUTES ?= 40
soak: $(VENV)/.done
	OMP_NUM_THREADS=1 $(BIN)/python tests/campaign/soak.py --minutes $(MINUTES) $(ARGS)

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
