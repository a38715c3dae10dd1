# vlexport for processors: ONNX Runtime, OpenVINO, PyTorch. `make image` builds it;
# docker run --rm -v "$PWD:/work" vlexport:cpu build CHECKPOINT --profile image
FROM python:3.12-slim

# The graphs of pruning and positions are compiled at a build; without a compiler they run eagerly.
# The image's release of Debian decides which version, and receives its fixes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# PyTorch's builds without CUDA: 200 MB in place of several GB. pyproject.toml has the versions that will do.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch

WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY vlexport ./vlexport
COPY recipes ./recipes
# The user of most machines with one: what is written under a mounted /work is theirs.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[openvino]" \
    && useradd --create-home --uid 1000 vlexport \
    && install --directory --owner 1000 /work

USER 1000
WORKDIR /work
ENTRYPOINT ["vlexport"]
CMD ["doctor"]
