# An image to train in, on CPU:   docker build --tag legato .
# on NVIDIA GPUs:                 docker build --tag legato --build-arg PIP_EXTRA_INDEX_URL= .
# tests/docs/test_image.py builds it where Docker is, and runs these steps in a clean environment elsewhere.
FROM python:3.11-slim

# pip reads it. PyPI's torch is that for CUDA, of gigabytes; the versions are those of constraints.txt.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

WORKDIR /opt/legato
COPY . .
RUN python -m pip install --no-cache-dir --constraint constraints.txt setuptools wheel
RUN python -m pip install --no-cache-dir --constraint constraints.txt --no-build-isolation .

# output as it comes, and not when a buffer is full or the container is gone
ENV PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["legato"]
CMD ["--help"]
