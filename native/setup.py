"""Builds the module once for every Python from 3.10: it uses the stable ABI only."""

from setuptools import Extension, setup

setup(
    packages=[],
    ext_modules=[
        Extension(
            "onceflow_kafka_native",
            ["src/onceflow_kafka_native.c"],
            extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
            libraries=["dl"],
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
