# The gRPC service; no torch in it. Built from the repository's root:
#   docker build -f deploy/docker/llm_functionalities.Dockerfile .
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
# Where else pip may look for wheels.
ARG PIP_FIND_LINKS=
RUN python3 -m venv /opt/oatmill
ENV PATH=/opt/oatmill/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY tools/requirements.py tools/
RUN python tools/requirements.py > /tmp/requirements.txt \
 && pip install -c constraints.txt -r /tmp/requirements.txt
# Installed as files rather than as a distribution: the other service's package stays out.
COPY shared shared
COPY llm_functionalities llm_functionalities
RUN site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && cp -r shared llm_functionalities "$site" && rm -rf "$site/shared/file_system" \
 && python -m compileall -q "$site/shared" "$site/llm_functionalities" \
 && pip uninstall -y -q pip setuptools

FROM ${BASE}
COPY --from=build /opt/oatmill /opt/oatmill
ENV PATH=/opt/oatmill/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/oatmill
RUN useradd --uid 1000 --create-home --home-dir /home/oatmill oatmill && chmod 755 /home/oatmill
USER oatmill
WORKDIR /home/oatmill
EXPOSE 8000
ENTRYPOINT ["python", "-m", "llm_functionalities"]
