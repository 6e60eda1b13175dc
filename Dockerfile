# A service on the devices of its container: docs/how-to/kubernetes.md. First: make wheel
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch==2.13.0 --index-url "$TORCH_INDEX"
COPY dist/rlmux-*.whl /tmp/
RUN pip install --no-cache-dir "$(echo /tmp/rlmux-*.whl)[train,serve]" && useradd --create-home --uid 1000 rlmux \
    && install --directory --owner=rlmux /state
USER 1000
WORKDIR /home/rlmux
ENV XDG_STATE_HOME=/state
VOLUME /state
EXPOSE 7461
CMD ["rlmux", "serve", "--listen", "127.0.0.1:7460", "--health", "0.0.0.0:7461"]
