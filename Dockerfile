# Graft without ComfyUI: the graph editor on port 8188, or any command of its command line, as `docker run graft run …`.
# PyTorch's packages on PyPI run on a CPU and, on x86-64, on NVIDIA cards. TORCH_INDEX is another place to take them from,
# for a smaller image that has a CPU only, or for AMD: PyTorch's page "Get Started" has the addresses.
FROM python:3.12-slim AS build
ARG TORCH_INDEX=""
RUN python -m venv /opt/graft
RUN if [ -n "$TORCH_INDEX" ]; then /opt/graft/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch; fi
COPY . /src
RUN /opt/graft/bin/pip install --no-cache-dir "/src[standalone,editor,optimizers]"

FROM python:3.12-slim
RUN useradd --create-home --uid 1000 graft && mkdir /work && chown graft /work
COPY --from=build /opt/graft /opt/graft
ENV PATH="/opt/graft/bin:$PATH"
USER graft
WORKDIR /work
VOLUME /work
EXPOSE 8188
HEALTHCHECK --start-period=60s --interval=30s --timeout=5s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8188/system_stats', timeout=4)"]
ENTRYPOINT ["graft"]
CMD ["editor", "--listen", "0.0.0.0", "--port", "8188", "--no-browser"]
