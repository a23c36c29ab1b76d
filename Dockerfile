# Build stage: compilers, and nvcc where CUDA_IMAGE brings it. Runtime stage: Python and the wheel.
#   docker build -t reflex .                                        CPU only
#   docker build -t reflex --build-arg BUILD_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#                --build-arg CUDA_ARCHS="90a;120" .                 with CUDA kernels for these
#   docker run --rm reflex --demo "Once upon a time"
# tests/docker/run_steps.sh executes the RUN steps where no image builder is at hand.
ARG BUILD_IMAGE=python:3.12-slim-bookworm
ARG RUNTIME_IMAGE=python:3.12-slim-bookworm

FROM ${BUILD_IMAGE} AS build
ARG CUDA_ARCHS=""
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake ninja-build python3 python3-venv python3-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python3 -m venv /build-venv && /build-venv/bin/pip wheel --no-deps -w /wheels ./protocol . --config-settings=cmake.define.REFLEX_CUDA_ARCHS="${CUDA_ARCHS}"

FROM ${RUNTIME_IMAGE}
COPY --from=build /wheels /wheels
RUN python3 -m venv /opt/reflex && /opt/reflex/bin/pip install --no-cache-dir /wheels/*.whl && rm -rf /wheels
# The driver's libraries come from the host's container runtime.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PATH=/opt/reflex/bin:$PATH
USER 65534
ENTRYPOINT ["/opt/reflex/bin/reflex", "generate"]
