# The image of every process of a deployment in containers: docker build -t fedapp .
FROM python:3.12-slim
WORKDIR /app
# Only these are copied: no key gets into an image.
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY fedapp fedapp
COPY strategies strategies
COPY custom custom
RUN pip install --no-cache-dir --constraint constraints.txt .
