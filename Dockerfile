# Builds allnorm for CPU ranks and runs the example of a newcomer:
#
#   docker build --tag allnorm .
#   docker run --rm --shm-size 1g allnorm
#
# TORCH_INDEX is the address of an index with the CPU build of torch; without it, torch for Linux brings
# gigabytes of CUDA libraries, which this image does not need.
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY . /allnorm
RUN pip install --no-cache-dir --config-settings=cmake.define.ALLNORM_CUDA=off "/allnorm[cli]"
WORKDIR /allnorm
CMD ["torchrun", "--standalone", "--nproc-per-node", "2", "examples/quickstart.py"]
