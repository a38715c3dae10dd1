# vlexport for NVIDIA GPUs: PyTorch with CUDA, ONNX Runtime, TensorRT for RTX. `make image-cuda` builds it;
# docker run --rm --gpus all -v "$PWD:/work" vlexport:cuda build CHECKPOINT --backend tensorrt_rtx
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv

WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY vlexport ./vlexport
COPY recipes ./recipes
RUN pip install --no-cache-dir ".[rtx]"

RUN useradd --create-home vlexport
USER vlexport
WORKDIR /work
ENTRYPOINT ["vlexport"]
CMD ["doctor"]
