# geventstalk in a container:
#
#   docker build -t geventstalk .
#   docker run -p 127.0.0.1:11300:11300 -v geventstalk:/data geventstalk                  journal on the volume
#   docker run -p 127.0.0.1:11300:11300 -v geventstalk:/data geventstalk -b /data -f0 -V  flags in place of `-b /data`
#
# Within the container the server listens on every address, because a published port arrives there. What the world can
# reach is decided by -p: without an address in front, docker publishes the port on every address of the host, past most
# firewalls. The protocol has no passwords.

# Any base with `python`, its headers, `pip` and venv will do, if it has gcc or apt-get: --build-arg BASE=...
ARG BASE=python:3.13-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
# mypyc needs a C compiler, also to fetch what it needs itself; the headers come with the base's Python.
RUN command -v gcc >/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; }
COPY setup.py pyproject.toml README.md LICENSE ./
COPY geventstalk geventstalk
COPY journal journal
# What a cluster needs to talk to PostgreSQL is in the image too; --build-arg EXTRAS= leaves it out.
ARG EXTRAS=[postgres]
# The wheel is built and installed here; the image gets the finished environment without pip and build tools.
RUN GEVENTSTALK_COMPILE=1 pip wheel --no-cache-dir --wheel-dir /wheels ".${EXTRAS}" \
    && python -m venv --without-pip /opt/geventstalk \
    && pip --python /opt/geventstalk/bin/python install --no-cache-dir --no-index /wheels/*.whl

FROM ${BASE}
# A number of its own, so that volumes keep their owner from image to image and `runAsNonRoot` can be verified.
RUN groupadd --gid 11300 geventstalk \
    && useradd --uid 11300 --gid 11300 --no-create-home --home-dir /data --shell /usr/sbin/nologin geventstalk \
    && install -d -o geventstalk -g geventstalk -m 0750 /data
COPY --from=build /opt/geventstalk /opt/geventstalk
ENV PATH=/opt/geventstalk/bin:$PATH
USER 11300:11300
VOLUME /data
EXPOSE 11300
STOPSIGNAL SIGTERM
# Asks `stats` where the server listens by default; GEVENTSTALK_PORT moves both. A long replay at the start is no illness.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m --retries=3 CMD ["python", "-c", "import os, socket; s = socket.create_connection(('127.0.0.1', os.environ.get('GEVENTSTALK_PORT') or '11300'), 4); s.sendall(b'stats\\r\\n'); raise SystemExit(not s.recv(64).startswith(b'OK '))"]
ENTRYPOINT ["geventstalk"]
CMD ["-b", "/data"]
