# The server and the command line, for CPUs and, with EXTRAS=cuda13, for NVIDIA GPUs (CUDA 13):
#
#     docker build -t jswa .
#     docker build -t jswa:cuda13 --build-arg EXTRAS=cuda13 .
#     docker run -p 8000:8000 jswa serve tiny --host 0.0.0.0
#
# Packages come from requirements.lock, each checked against its hash. The build stage compiles the CPU kernels, where the
# processor is one that they are written for; the image has no compiler. The base image is named by the digest of its
# index, for all platforms: whoever wants its later fixes names a later one, in both stages.

FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS build
ARG EXTRAS=""
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /src
COPY pyproject.toml requirements.lock README.md CHANGELOG.md LICENSE NOTICE ./
COPY tools/lock.py tools/lock.py
RUN python -m venv /opt/jswa && python -m venv /opt/build
RUN python tools/lock.py select core server chat $EXTRAS > /opt/build/requirements.txt \
    && /opt/jswa/bin/python -m pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /opt/build/requirements.txt
RUN python tools/lock.py select build > /opt/build/tools.txt \
    && /opt/build/bin/python -m pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /opt/build/tools.txt
COPY jswa jswa
COPY pallas_kernels pallas_kernels
COPY server server
RUN /opt/build/bin/python -m hatchling build --target wheel --directory /opt/build/dist \
    && /opt/jswa/bin/python -m pip install --no-cache-dir --no-deps --no-index /opt/build/dist/*.whl \
    && /opt/jswa/bin/python -m pip uninstall --yes pip
RUN test "$(uname -m)" != x86_64 || /opt/jswa/bin/python -P -m pallas_kernels.cpu.build

FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
RUN useradd --create-home --uid 1000 jswa
COPY --from=build /opt/jswa /opt/jswa
ENV PATH=/opt/jswa/bin:$PATH
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER jswa
WORKDIR /home/jswa
EXPOSE 8000
ENTRYPOINT ["jswa"]
CMD ["serve", "tiny", "--host", "0.0.0.0"]
