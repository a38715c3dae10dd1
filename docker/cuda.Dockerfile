# vlexport for NVIDIA GPUs: PyTorch with CUDA, ONNX Runtime, TensorRT for RTX. `make image-cuda` builds it;
# docker run --rm --gpus all -v "$PWD:/work" vlexport:cuda build CHECKPOINT --backend tensorrt_rtx
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# The image's release of Ubuntu decides which versions, and receives its fixes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY vlexport ./vlexport
COPY recipes ./recipes
# The user of most machines with one, which this image has under another name: what is written under a mounted
# /work is theirs.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[rtx]" \
    && userdel --remove ubuntu \
    && useradd --create-home --uid 1000 vlexport \
    && install --directory --owner 1000 /work

USER 1000
WORKDIR /work
ENTRYPOINT ["vlexport"]
CMD ["doctor"]
