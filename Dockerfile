# One machine with CUDA. Nobody here has built this image: tell us what you had to change.
# docker build -t rllib_nlac . && docker run --gpus all --shm-size=8g rllib_nlac doctor
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git python3-dev python3-venv
WORKDIR /rllib_nlac
COPY . .
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir ".[gpu]" -c constraints.txt
ENV PATH=/rllib_nlac/.venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["rllib"]
