"""Builds, installs and checks the pinned-hot-experts overlay of vLLM."""
