# An image for training on CPU:   docker build --tag legato .
# on NVIDIA GPUs:                 docker build --tag legato --build-arg PIP_EXTRA_INDEX_URL= .
# tests/docs/test_image.py builds it where Docker is installed, and runs its steps in a clean environment elsewhere.
FROM python:3.11-slim

# pip reads this variable: PyPI's torch includes CUDA and takes gigabytes. constraints.txt pins the versions.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

WORKDIR /opt/legato
COPY . .
RUN python -m pip install --no-cache-dir --constraint constraints.txt setuptools wheel
RUN python -m pip install --no-cache-dir --constraint constraints.txt --no-build-isolation .

# print output at once, not when a buffer is full or the container exits
ENV PYTHONUNBUFFERED=1
WORKDIR /work
ENTRYPOINT ["legato"]
CMD ["--help"]
