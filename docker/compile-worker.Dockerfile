# The planning and compile workers: the server with nvcc from its wheels and g++. Build from the root of the checkout:
#   docker build -f docker/compile-worker.Dockerfile -t cukiln-compile-worker .
# `--build-arg CUDA=12`: with NVRTC of CUDA 12, for GPUs whose driver is of release 525 to 579.
FROM python:3.13-slim-bookworm

ARG CUDA=13

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PATH=/venv/bin:$PATH
WORKDIR /app

# Debian keeps only the newest build of a package, so a version that is pinned today cannot be installed tomorrow.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml constraints.txt LICENSE CHANGELOG.md ./
COPY client client
RUN older=${CUDA#13} \
    && python -m venv /venv \
    && pip install --constraint constraints.txt pip hatchling editables \
    && pip install --constraint constraints.txt --no-build-isolation --editable ".[server]" --group postgres \
        --group "toolchain${older:+-cuda$older}"

COPY codegen codegen
COPY storage storage
COPY workers workers
COPY docker/entrypoint.py docker/entrypoint.py
RUN useradd --uid 10001 --create-home cukiln \
    && install --directory --mode 700 --owner cukiln /data

USER 10001
ENV CUKILN_CUDA=$CUDA CUKILN_DATA=/data
VOLUME /data
ENTRYPOINT ["python", "/app/docker/entrypoint.py"]
CMD ["python", "-m", "workers.worker.main", "compile"]
