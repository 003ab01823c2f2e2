# A GPU worker: the server with CuPy, no compiler. Build from the root of the checkout:
#   docker build -f docker/gpu-worker.Dockerfile -t cukiln-gpu-worker .
# It needs the NVIDIA Container Toolkit on the host, which brings the driver's libraries into the container: those of
# release 580 or later. `--build-arg CUDA=12`, of the compile workers' image too: of 525 or later.
FROM python:3.13-slim-bookworm

ARG CUDA=13

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PATH=/venv/bin:$PATH
WORKDIR /app

COPY pyproject.toml constraints.txt LICENSE CHANGELOG.md ./
COPY client client
RUN older=${CUDA#13} \
    && python -m venv /venv \
    && pip install --constraint constraints.txt pip hatchling editables \
    && pip install --constraint constraints.txt --no-build-isolation --editable ".[server]" --group postgres \
        --group "gpu${older:+-cuda$older}"

COPY codegen codegen
COPY storage storage
COPY workers workers
COPY docker/entrypoint.py docker/entrypoint.py
RUN useradd --uid 10001 --create-home cukiln \
    && install --directory --mode 700 --owner cukiln /data

USER 10001
ENV CUKILN_CUDA=$CUDA CUKILN_DATA=/data NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /data
ENTRYPOINT ["python", "/app/docker/entrypoint.py"]
CMD ["python", "-m", "workers.worker.main", "gpu"]
