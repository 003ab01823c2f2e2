# The API and the reconciler: no compiler inside. Build from the root of the checkout:
#   docker build -f docker/service.Dockerfile -t cukiln-service .
FROM python:3.13-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PATH=/venv/bin:$PATH
WORKDIR /app

# The packages first: they change less often than the server, so this layer stays.
COPY pyproject.toml constraints.txt LICENSE CHANGELOG.md ./
COPY client client
RUN python -m venv /venv \
    && pip install --constraint constraints.txt pip hatchling editables \
    && pip install --constraint constraints.txt --no-build-isolation --editable ".[server]" --group postgres

COPY codegen codegen
COPY storage storage
COPY workers workers
COPY service service
COPY docker/entrypoint.py docker/entrypoint.py
RUN useradd --uid 10001 --create-home cukiln \
    && install --directory --mode 700 --owner cukiln /data

USER 10001
ENV CUKILN_DATA=/data CUKILN_HOST=0.0.0.0 CUKILN_PORT=8765
VOLUME /data
EXPOSE 8765
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8765/healthz', timeout=4)"]
ENTRYPOINT ["python", "/app/docker/entrypoint.py"]
CMD ["python", "-m", "service"]
