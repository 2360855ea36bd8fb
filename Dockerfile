# Everstream in a container: two stages, no compiler and no root in the second.
#
#   docker build -t everstream .
#   docker build -t everstream --build-arg TORCH_INDEX=ADDRESS .            where pip's own index has no CPU build of torch
#   docker build -t everstream:cuda --build-arg DEVICE=cuda --build-arg BASE_IMAGE=… .
#
# The base needs Python 3.11 with venv and, for the first stage, apt.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ARG DEVICE=cpu
ARG TORCH_INDEX=
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# DL3008 wants a version of g++, which differs from base image to base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /srv/everstream
COPY requirements.lock ./
# DEVICE=cpu insists on torch's CPU build: better no image than one with gigabytes of CUDA that nobody asked for.
RUN python3 -m venv /srv/venv \
    && if [ "$DEVICE" = cpu ]; then sed -i 's/^\(torch==[0-9.]*\)$/\1+cpu/' requirements.lock; fi \
    && /srv/venv/bin/python -m pip install --no-cache-dir \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements.lock \
    && rm -rf /srv/venv/lib/python3*/site-packages/torch/{test,include,share} \
        /srv/venv/lib/python3*/site-packages/torch/bin/{protoc*,test_*} \
    && find /srv/venv -name '*.a' -delete
COPY app ./app
COPY model ./model
COPY LICENSE ./
RUN /srv/venv/bin/python -m model.decoder.kernels.cpu.build \
    && /srv/venv/bin/python -m compileall -q app model

FROM ${BASE_IMAGE}
RUN groupadd --gid 10001 everstream \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin everstream \
    && install -d -o everstream -g everstream /models
COPY --from=build /srv/venv /srv/venv
COPY --from=build /srv/everstream /srv/everstream
COPY docker/healthcheck.py /srv/healthcheck.py
WORKDIR /srv/everstream
ENV PATH=/srv/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EVERSTREAM_HOST=0.0.0.0 \
    EVERSTREAM_MODEL_CACHE=/models
USER 10001:10001
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "/srv/healthcheck.py"]
ENTRYPOINT ["python", "-m", "app"]
CMD ["serve"]
