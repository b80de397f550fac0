import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

class GatewayParameters:
    def __init__(self, *, port: int = ..., auth_token: str | None = ...) -> None: ...

class JavaGateway:
    jvm: Any
    def __init__(self, *, gateway_parameters: GatewayParameters) -> None: ...
    def close(self) -> None: ...

def launch_gateway(
    *,
    jarpath: str = ...,
    classpath: str = ...,
    javaopts: Sequence[str] = ...,
    redirect_stdout: TextIO | None = ...,
    redirect_stderr: TextIO | None = ...,
    java_path: str = ...,
    create_new_process_group: bool = ...,
    enable_auth: bool = ...,
    cwd: str | Path | None = ...,
    return_proc: bool = ...,
) -> tuple[int, str, subprocess.Popen[bytes]]: ...
