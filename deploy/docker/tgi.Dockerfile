# The text-generation server. Built from the repository's root:
#   docker build -f deploy/docker/tgi.Dockerfile --target tgi .
#   docker build -f deploy/docker/tgi.Dockerfile --target tgi --build-arg EXTRAS="engine cuda" .    # for GPUs
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
# Where else pip may look for wheels.
ARG PIP_FIND_LINKS=
ARG TORCH=torch==2.13.0
# The extras of the package, with spaces between them: "engine cuda" for GPUs.
ARG EXTRAS=engine
RUN python3 -m venv /opt/oatmill
ENV PATH=/opt/oatmill/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN pip install ${TORCH}
COPY pyproject.toml constraints.txt ./
COPY tools/requirements.py tools/
RUN python tools/requirements.py ${EXTRAS} > /tmp/requirements.txt \
 && pip install -c constraints.txt "setuptools>=77" -r /tmp/requirements.txt
COPY README.md LICENSE ./
COPY shared shared
COPY llm_functionalities llm_functionalities
COPY oatmill oatmill
COPY tgi_server tgi_server
RUN pip install --no-deps --no-build-isolation .

FROM ${BASE} AS tgi
# Triton calls the compiler on GPUs; the CPU kernels are compiled below.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/oatmill /opt/oatmill
# Triton's kernels are compiled into a place where any user may write, also below a read-only root.
ENV PATH=/opt/oatmill/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/oatmill USER=oatmill HUGGINGFACE_HUB_CACHE=/data TRITON_HOME=/tmp
# Any user may read the kernels that are compiled below.
RUN useradd --uid 1000 --create-home --home-dir /home/oatmill oatmill && chmod 755 /home/oatmill \
 && mkdir /models /data && chown oatmill /models /data
USER oatmill
# For each kind of CPU, from x86-64-v2 (or any aarch64) on; the best one that runs is chosen at start.
RUN python -m tgi_server.engine.kernels all
WORKDIR /home/oatmill
COPY deploy/docker/tgi-entrypoint.sh /usr/local/bin/tgi-entrypoint
EXPOSE 80
ENTRYPOINT ["tgi-entrypoint"]

FROM tgi AS tester
USER root
COPY --from=build /src/pyproject.toml /src/constraints.txt /work/
COPY tools /work/tools
RUN cd /work && python tools/requirements.py dev > /tmp/requirements.txt \
 && pip install --no-cache-dir -c constraints.txt -r /tmp/requirements.txt
COPY . /work
RUN chown -R oatmill /work
USER oatmill
WORKDIR /work
ENTRYPOINT ["python", "-m", "pytest", "-p", "no:cacheprovider"]
CMD ["tests/unit"]
